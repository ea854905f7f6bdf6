# Not `tests/kernels`: pytest puts `tests` on the path, and transformers would import it instead of its own `kernels`.
