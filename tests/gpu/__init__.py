"""What only a GPU shows: ``python -m tests.gpu`` (checks), ``python -m tests.gpu.bench``."""
