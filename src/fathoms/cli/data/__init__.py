"""`fathoms data`: check, describe or pack a data set, one file per command."""
