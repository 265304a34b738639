"""``python -m mclclip``: what torchrun starts (``torchrun ... -m mclclip train ...``)."""

from mclclip.ranks import signals, streams

if __name__ == "__main__":
    streams.outlive_readers()  # before anything is opened
    signals.install_handlers()  # before the imports below, which take a moment
    from mclclip.cli.entry import command

    command()
