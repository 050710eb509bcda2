"""The command line.

Nothing heavy is imported before it is needed: --help must not wait for torch.
"""
