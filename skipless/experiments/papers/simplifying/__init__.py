"""He & Hofmann, Simplifying Transformer Blocks (ICLR 2024): its figures and tables as experiments."""
