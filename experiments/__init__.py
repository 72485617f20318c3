"""Tables and figures of the paper, and ours, as commands: yaml says which runs a table is made of,
results are one small file for each seed.
"""
