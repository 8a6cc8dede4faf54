"""Load trained models, evaluate them, and predict with them."""
