"""Text: tokenizers and chat templates, and what the words of a text say: its stage, its sentences, its thoughts."""
