"""Reading tars that are not to be trusted: what tarfile reads of good ones, and an end of bad ones.

``make test`` reads some hundred mutations, ``make soak`` 20,000.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest

from mclclip.data.findings import MAX_EXAMPLES, REASONS
from mclclip.data.remote import StoredFile
from mclclip.data.shard_scan import scan_shard
from mclclip.data.tar_members import Member, TarFault, read_members
from tests.hostile_tars import (
    BLOCK,
    FORMATS,
    base_256,
    header,
    long_name,
    member,
    mutated,
    octal,
    pax,
    record,
    whole,
)
from tests.matrix import IN_SOAK

NUM_SLICE, NUM_SOAK = 80, 20_000
END = bytes(2 * BLOCK)
GOOD = member("a.jpg", b"image") + member("a.txt", b"caption")


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fails where the block takes longer, also where it would never end."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def read(path: Path) -> tuple[list[Member], TarFault | None]:
    members = []
    with open(path, "rb") as file:
        try:
            for found in read_members(file):
                members += [] if found.link else [found]
        except TarFault as fault:
            return members, fault
    return members, None


class Bounded(tarfile.TarInfo):
    """tarfile's reader, which refuses the sizes on which it would not end."""

    def _block(self, count: int) -> int:
        if not 0 <= count <= 1 << 21:
            raise tarfile.InvalidHeaderError("absurd size")
        return int(super()._block(count))  # type: ignore[misc]


def as_tarfile_reads(path: Path) -> list[Member] | None:
    """The whole regular files of a tar up to its first fault; None where tarfile itself fails."""
    found, size = [], os.path.getsize(path)
    try:
        with tarfile.open(path, "r:", tarinfo=Bounded) as tar:
            while (info := tar.next()) is not None:
                if info.isreg() and info.offset_data + info.size > size:
                    break
                if info.isreg():
                    found.append(Member(info.name, info.offset_data, info.size))
    except tarfile.TarError:
        return found
    except (ValueError, OSError, RecursionError, MemoryError):
        return None
    return found


# --- good tars --------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", FORMATS)
def test_good_tars_are_read_as_tarfile_reads_them(tmp_path: Path, dialect: int) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(whole(dialect, 4))
    members, fault = read(path)
    assert fault is None and len(members) == 12
    assert members == as_tarfile_reads(path)
    data = path.read_bytes()
    assert data[members[0].offset :][: members[0].size] == b"image" * 150


def test_sizes_in_base_256_and_in_pax_records_of_good_tars(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    for first in (
        header("a.jpg", size=base_256(700)),
        pax(record("size", "700"), record("mtime", "1.5")) + header("a.jpg"),
        pax(record("comment", "made by git"), kind=b"g") + header("a.jpg", size=octal(700)),
    ):
        path.write_bytes(first + bytes(1024) + GOOD + END)
        assert read(path)[0] == as_tarfile_reads(path)
        assert [(found.name, found.size) for found in read(path)[0]][:2] == [
            ("a.jpg", 700),
            ("a.jpg", 5),
        ]


def test_links_are_counted_as_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(
        header("b.jpg", b"1") + header("c.jpg", b"2") + member("c.txt", b"c") + GOOD + END
    )
    found = scan_shard(StoredFile(str(path)), "s", "txt")
    assert found.rows["key"].to_pylist() == ["s/a"]
    findings = found.findings.to_json()
    assert {r: e["count"] for r, e in findings.items()} == {"link_member": 2, "no_image": 1}
    assert findings["link_member"]["examples"][0] == f"'b.jpg' in {path}"


def test_pictures_whose_names_have_dots_are_lost_and_counted_each(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    names = ("v1.0.jpg", "v1.0.txt", "v1.1.jpg", "v1.1.txt")
    names += ("lone.txt", "lone.seg.png", "b.jpg", "b.seg.png")
    path.write_bytes(b"".join(member(name, b"1") for name in names) + END)
    findings = scan_shard(StoredFile(str(path)), "s", "txt").findings.to_json()
    counts = {reason: entry["count"] for reason, entry in findings.items()}
    assert (counts["dotted_name"], counts["no_image"]) == (2, 1)


# --- bad ones ---------------------------------------------------------------------------------

CHAIN = b"".join(long_name(f"name{number}") for number in range(5000))
BAD = {
    "negative_size": (header(size=base_256(-512)), "damaged_shard"),
    "negative_octal": (header(size=b"-0000001000\0"), "damaged_shard"),
    "negative_pax_size": (pax(record("size", "-1024")) + header(), "damaged_shard"),
    "negative_size_of_records": (header("p", b"x", base_256(-1024)), "damaged_shard"),
    "negative_size_of_a_sparse_file": (header("p", b"S", base_256(-1024)), "damaged_shard"),
    "two_to_the_80": (header(size=base_256(2**80)), "damaged_shard"),
    "forty_gigabytes": (header(size=base_256(40 << 30)), "truncated_shard"),
    "forty_gigabytes_of_records": (header("p", b"x", base_256(40 << 30)), "damaged_shard"),
    "chain_of_long_names": (CHAIN + header(), "damaged_shard"),
    "chain_of_records": (pax(record("comment", "x")) * 5000 + header(), "damaged_shard"),
    "long_name_of_nothing": (long_name("x") + END, "damaged_shard"),
    "sparse_file": (header("s.jpg", b"S", octal(600)) + bytes(1024), "damaged_shard"),
    "sparse_records": (pax(record("GNU.sparse.map", "a,b")) + header(), "damaged_shard"),
    "records_of_no_length": (pax(b"0 path=x\n") + header(), "damaged_shard"),
    "records_of_a_huge_length": (pax(b"9" * 5000 + b" path=x\n") + header(), "damaged_shard"),
    "one_size_for_all": (pax(record("size", "0"), kind=b"g") + header(), "damaged_shard"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_hostile_header_ends_its_shard_and_is_named(tmp_path: Path, case: str) -> None:
    blocks, reason = BAD[case]
    path = tmp_path / "x.tar"
    for before, expected in ((GOOD, reason), (b"", "unreadable_shard")):
        path.write_bytes(before + blocks + GOOD + END)
        with within(120):
            found = scan_shard(StoredFile(str(path)), "s", "txt")
        assert found.rows["key"].to_pylist() == (["s/a"] if before else [])
        findings = found.findings.to_json()
        if reason == "truncated_shard":  # the header is right, there is just not so much
            expected = reason
        assert {r: e["examples"] for r, e in findings.items()} == {expected: [str(path)]}


def test_long_names_and_large_captions_do_not_spread(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    endless = long_name("n" * 100_000) + member("x.jpg", b"i")
    large = member("b.jpg", b"i") + header("b.txt", size=octal(17 << 20))
    path.write_bytes(GOOD + endless + large)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size + (17 << 20) + 2 * BLOCK)
    found = scan_shard(StoredFile(str(path)), "s", "txt")
    assert found.rows["key"].to_pylist() == ["s/a", "s/b"]
    assert found.rows["num_captions"].to_pylist() == [1, 0]
    assert found.rows["text_size"].to_pylist() == [7, 0]
    findings = found.findings.to_json()
    assert {r: e["count"] for r, e in findings.items()} == {"bad_name": 1, "large_caption": 1}
    assert "(100000 characters)" in findings["bad_name"]["examples"][0]
    assert len(findings["bad_name"]["examples"][0]) < 300


def test_an_image_of_more_than_a_gibibyte_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(GOOD + header("b.jpg", size=octal((1 << 30) + 1)))
    with open(path, "r+b") as file:  # a hole: it takes no room on the disk
        file.truncate(path.stat().st_size + (1 << 30) + 3 * BLOCK)
    found = scan_shard(StoredFile(str(path)), "s", "txt")
    assert found.rows["key"].to_pylist() == ["s/a"]
    assert {r: e["count"] for r, e in found.findings.to_json().items()} == {"large_image": 1}


# --- mutations --------------------------------------------------------------------------------


@functools.cache
def members_of(path: Path, good: bytes) -> list[Member]:
    path.write_bytes(good)
    return read(path)[0]


def check(path: Path, seed: int) -> str | None:
    """Reads one mutation and returns the fault that ended it; asserts what holds for all."""
    good, data = mutated(seed)
    whole_members = members_of(path, good)
    path.write_bytes(data)
    start = time.process_time()
    members, fault = read(path)
    found = scan_shard(StoredFile(str(path)), "s", "json:caption", ["shape"])
    assert time.process_time() - start < 20  # most take a millisecond
    for item in members:
        assert 0 < item.offset <= item.offset + item.size <= len(data)
    reasons = found.findings.to_json()
    assert {reason.partition(":")[0] for reason in reasons} <= REASONS.keys()
    assert all(len(entry["examples"]) <= MAX_EXAMPLES for entry in reasons.values())
    # What lies before the first byte that differs is read as before.
    same = next((n for n, (a, b) in enumerate(zip(good, data, strict=False)) if a != b), len(data))
    kept = [item for item in whole_members if item.offset + item.size <= min(same, len(data))]
    assert members[: len(kept)] == kept
    # Nothing is seen that tarfile does not see, and without a fault nothing is missing.
    theirs = as_tarfile_reads(path)
    if theirs is not None:
        assert members == theirs[: len(members)]
        if fault is None or fault.reason == "data_after_end":
            assert len(members) == len(theirs)
    return None if fault is None else fault.reason


def mutations(path: Path, number: int) -> tuple[set[str | None], int]:
    """How reading of each mutation ended, and by how many KiB this process grew meanwhile."""
    ends = set()
    check(path, 0)  # what is loaded for good by a first call
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(number):
        try:
            with within(120):
                ends.add(check(path, seed))
        except Exception as error:
            raise AssertionError(f"mutation {seed}: {error!r}") from error
    return ends, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@pytest.mark.parametrize("number", [NUM_SLICE, pytest.param(NUM_SOAK, marks=IN_SOAK)])
def test_mutated_tars_end_and_show_nothing_new(tmp_path: Path, number: int) -> None:
    """In a process of its own, whose peak is not that of earlier tests."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        ends, grown_kib = pool.submit(mutations, tmp_path / "x.tar", number).result()
    assert grown_kib < 100_000
    faults = ("truncated_shard", "damaged_shard", "unreadable_shard", "data_after_end")
    assert ends >= {None, *faults}
