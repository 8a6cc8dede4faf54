"""Attentions with their heads and gates."""
