"""He & Hofmann, Simplifying Transformer Blocks (ICLR 2024): its figures and tables as experiments.

attention.py   figures 2 to 4
blocks.py      figures 5, 6 and 8
bert.py        figure 7, tables 1 and 2
books.py       Languini, in the appendix
values.py      the appendix on W^V and W^P
appendix.py    the appendix's other ablations
bounds.py      the numbers that the paper's words are taken for
"""
