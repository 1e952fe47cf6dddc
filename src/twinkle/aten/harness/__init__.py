"""The three levels at which an operator is proved: its kernel, the operator in PyTorch, a model that uses it."""
