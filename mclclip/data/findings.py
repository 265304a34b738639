"""Counts everything in other people's data that is not read, or is read only in part.

Every file, member, row and entry is either read or counted here under a reason of `REASONS`.
`pack`, `index`, `finetune`, `doctor --data` and the class folders of `eval` log one line for each
reason, and keep the counts in their manifests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_EXAMPLES = 20

REASONS = {
    # of shards
    "no_image": "samples without an image, left out",
    "dotted_name": "pictures with a dot before that of their suffix, left out, since the key of a "
    "sample ends at its first dot: name them anew, as in 'a-1.jpg' for 'a.1.jpg'",
    "no_caption": "samples without a caption, kept: what needs captions leaves them out",
    "no_field": "samples without one of the fields of captions: the others are drawn from",
    "zero_byte_image": "images of zero bytes, left out",
    "zero_byte_caption": "samples with a caption file of zero bytes, kept as without a caption",
    "no_attribute": "samples without a value of an attribute, kept: classes of it leave them out",
    "subset": "samples that the subset lacks, left out",
    "no_uid": "samples without a uid, of which the subset says nothing, left out",
    "large_image": "samples with an image of more than 1 GiB, left out",
    "large_caption": "samples with a caption file of more than 16 MiB, kept as without a caption",
    "bad_json": "samples whose .json does not parse, kept as without a caption",
    "bad_text": "captions that are not UTF-8, kept as without a caption: save them as UTF-8",
    "duplicate_key": "samples whose key came before in their source, left out: name the members of "
    "each sample anew, one key for each",
    "copied_sample": "samples of equal key, image and caption as an earlier one, left out",
    "no_label": "samples without a class (.cls), left out",
    "several_images": "samples with several images, of which the first is used",
    "several_lines": "texts of several lines, as nearly all have, each read as one caption: where "
    "each line is a caption, set data.sources.NAME.captions (of an evaluation shard_captions) to "
    "lines",
    "bad_name": "tar members whose name gives no key, and files and folders whose name is not "
    "UTF-8, left out",
    "other_member": "tar members that are neither pictures nor captions, left out",
    "link_member": "tar members that are links to files, left out: write the files themselves (tar "
    "--dereference --hard-dereference)",
    "truncated_shard": "shards cut short: what comes before the cut is used",
    "damaged_shard": "shards with a broken header, or a member stored without its holes (tar "
    "--sparse): what comes before it is used",
    "data_after_end": "shards with data after their end mark (joined tars?), which is not read",
    "unreadable_shard": "shards that are no tar files, left out",
    "empty_shard": "shards without members",
    "lfs_pointer": "pointers of git-lfs in the place of files, left out: run 'git lfs pull' in "
    "their repository",
    "lfs_shard": "shards that are pointers of git-lfs, left out: run 'git lfs pull' in their "
    "repository",
    # of folders and tables
    "no_path": "rows or entries without an image, left out",
    "empty_caption": "empty captions (such as nan, None, null and []), which do not count",
    "outside_folder": "files that lie neither below the folder of the data nor below one of "
    "--allow-root, with all links followed, left out",
    "linked_folder": "linked folders that lead out of the folder of the data, left out: name what "
    "they lead to with --allow-root",
    "unnamed_picture": "pictures of the folder that no row of the table names, left out",
    "missing_image": "images that are not in the folder, left out",
    "unreadable": "files and folders that cannot be read (permissions, or a fault of their disk), "
    "left out",
    "unsupported_extension": "images of kinds that Pillow does not read here, left out: convert "
    "them, such as to JPEG",
    "other_file": "files that are neither pictures nor their texts, left out",
    "hidden": "hidden files and folders (their name begins with a dot), left out",
    "lone_text": "texts without a picture of their name, left out",
    "shared_text": "pictures that share their text with another one of their name (a.jpg, a.png): "
    "take masks and copies out of the folder",
    "no_class": "pictures that lie in no folder of a class, left out",
    "sub_folder": "folders within the folder of a class, left out",
    "open_quote": "lines within a quotation mark that is never closed, read as rows of their own: "
    "a quotation mark within a caption is doubled",
    "joined_lines": "lines that a quotation mark has joined to one row, which does not end as it "
    "began: a quotation mark within a caption is doubled",
    "joined_cells": "captions with the delimiter of the table in them and without quotation marks, "
    "read as a whole",
    "extra_cells": "rows with more cells than the header, of which the rest is not read: put "
    "captions that hold the delimiter in quotation marks",
    "uncaptioned": "images without any caption where captions are needed, left out",
    "undecodable": "images that cannot be decoded, left out",
    "transparent": "pictures with transparency, which are laid on white",
    "narrow_range": "pictures of 16 bits whose values use less than a tenth of the range, which "
    "are nearly black as 8 bits: stretch them before",
}
# The reasons of samples that a subset leaves out, and those of damaged shards.
LEFT_OUT = ("subset", "no_uid")
UNREADABLE = ("truncated_shard", "damaged_shard", "unreadable_shard", "lfs_shard")

NO_TEXTS = frozenset({"nan", "none", "null", "<na>", "[]"})
"""Words, in lower case, that pandas and others write for a missing caption."""

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""The first bytes of a pointer, which git-lfs leaves where a file was not fetched."""


def nearly_all(num_texts: int) -> float:
    """Returns how many of ``num_texts`` must have n lines to read each line as a caption."""
    return max(0.95 * num_texts, 10)


class Findings:
    """Counts, and up to 20 examples, of each reason in `REASONS`.

    A reason may have a detail behind it, such as 'no_attribute:colour'. ``counts`` is the result of
    `to_json`.
    """

    def __init__(self, counts: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._by_reason = {
            reason: (int(entry["count"]), list(entry["examples"]))
            for reason, entry in (counts or {}).items()
        }

    def add(self, reason: str, *examples: str, count: int | None = None) -> None:
        """Adds ``count`` cases of a reason (None: one per example)."""
        number = len(examples) if count is None else count
        if number:
            total, all_examples = self._by_reason.setdefault(reason, (0, []))
            all_examples.extend(examples[: MAX_EXAMPLES - len(all_examples)])
            self._by_reason[reason] = (total + number, all_examples)

    def merge(self, other: Findings) -> None:
        """Adds the counts of ``other``, and its examples behind those of this."""
        for reason, (total, examples) in other._by_reason.items():
            self.add(reason, *examples, count=total)

    def only(self, reasons: Sequence[str]) -> Findings:
        """Returns the counts of some reasons, with any detail."""
        entries = self.to_json().items()
        return Findings({r: entry for r, entry in entries if r.partition(":")[0] in reasons})

    def settle_lines(self, num_texts: int) -> None:
        """Drops the counts of texts of n lines, unless nearly all of ``num_texts`` have n.

        Only then is it likely that each line is a caption, and that the user wants to know.
        """
        for reason in [r for r in self._by_reason if r.startswith("several_lines:")]:
            if self._by_reason[reason][0] < nearly_all(num_texts):
                del self._by_reason[reason]

    def without(self, reasons: Sequence[str]) -> Findings:
        """Returns the counts of all other reasons."""
        entries = self.to_json().items()
        return Findings({r: entry for r, entry in entries if r.partition(":")[0] not in reasons})

    def total(self) -> int:
        """Returns the sum of all counts."""
        return sum(count for count, _ in self._by_reason.values())

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Returns ``{reason: {count, examples}}``, which manifests keep."""
        return {r: {"count": n, "examples": e} for r, (n, e) in sorted(self._by_reason.items())}

    def lines(self) -> list[str]:
        """Returns one line for each reason, with its text from `REASONS`."""
        return [
            f"{n} {REASONS.get(r.partition(':')[0], r)} ({r}), e.g. "
            + ", ".join(each if len(each) <= 100 else f"{each[:100]}..." for each in e[:3])
            for r, (n, e) in sorted(self._by_reason.items())
        ]
