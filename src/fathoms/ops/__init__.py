"""Operations with a reference in plain torch and, where it pays, a kernel: attentions, GELU, MLP."""
