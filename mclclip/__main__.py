"""``python -m mclclip``: what torchrun starts (``torchrun ... -m mclclip train ...``)."""

from mclclip.cli import main

if __name__ == "__main__":
    main()
