"""Which artifacts ``--force`` makes again."""

from enum import Enum


class Remake(Enum):
    """Which existing artifacts a verb moves aside and makes again.

    NOTHING  none: an artifact of other settings is refused, a finished one is skipped
    UNFIT    artifacts of other settings, and finished ones that are damaged
    ALL      all finished ones as well

    An unfinished artifact of the same settings is resumed in all three cases.
    """

    NOTHING = "nothing"
    UNFIT = "unfit"
    ALL = "all"
