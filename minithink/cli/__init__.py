"""What all command lines share: arguments, exit codes, signals, the terminal, prompts, threads."""
