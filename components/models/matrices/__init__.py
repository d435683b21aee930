"""How weights are held and multiplied: kernels of a CPU, and four bits."""
