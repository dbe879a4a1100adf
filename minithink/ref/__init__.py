"""The operations of the decoder and the cache in PyTorch: the readable twins of the Triton kernels in `kernels/`.

A file and its kernel have the same name, signature and results; `tests/kernels/` compares them. Words and symbols in
these files:

    L, Hq, Hkv, D   layers, query heads, KV heads, channels of a head; g = Hq / Hkv query heads share a KV head
    B, N            rows of the cache, one sequence each; rows that an operation works on
    S, W            columns of a list or a lane: tokens, oldest first
    lane            what one KV head of one layer holds of one row
    unit            lanes that share a page table and a list of tokens: [Lt, B, Ht], Lt is L or 1, Ht is Hkv or 1
                    (scopes in `kv/contract.py`)
    list            place and position of each token of a unit, oldest first
    place           page · most + slot, where most is the number of slots of a page in the format with the most;
                    negative, −1 − index, for a token that lies in no page yet
    buffer, ring    full-precision tokens that wait to be quantized together
    trash           a page or slot that takes writes that do not count; it is never read
"""
