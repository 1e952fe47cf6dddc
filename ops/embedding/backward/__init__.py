"""``aten::embedding_dense_backward`` by a kernel of its own: what the derivative of ``embedding`` calls."""
