"""The training objective: losses, distillation, LearnableScaler's penalties."""
