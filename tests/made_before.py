"""What most commands of tests make once a process: here it is made before they are forked."""

from pathlib import Path

import simplejpeg  # noqa: F401

from mclclip.models.loading import load_towers
from tests import tiny

tiny.make_config(Path("run"), Path("data"))
load_towers(tiny.MODEL)
