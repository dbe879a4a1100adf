"""Result files: what each says of how it was measured, how it is written, and whether its code has changed since."""
