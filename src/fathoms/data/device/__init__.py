"""Device-side image work: host-to-device copies, the choice of backend, resizing, Triton kernels."""
