"""Which artifacts ``--force`` makes again."""

from enum import Enum


class Remake(Enum):
    """Which artifacts that are there a verb moves aside and makes again.

    NOTHING  none: one of other settings is refused, a finished one is skipped
    UNFIT    those of other settings, and finished ones that are damaged
    ALL      finished ones too, whatever they are

    One that was begun with these settings is resumed in all three cases.
    """

    NOTHING = "nothing"
    UNFIT = "unfit"
    ALL = "all"
