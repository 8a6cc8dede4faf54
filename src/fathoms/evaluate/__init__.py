"""How good a model is: accuracy, calibration, and the robustness sets."""
