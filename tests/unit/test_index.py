"""The index verb: which shards, in which order, and what re-indexing does."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mclclip import config
from mclclip.data import shard_paths
from mclclip.data.sample_index import KIND, SampleIndex
from mclclip.eval.images import read_shards
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import read_manifest
from mclclip.util.remake import Remake
from mclclip.verbs import index
from tests import hostile_tars
from tests.tars import write_tar


def make_shard(path: Path, *keys: str, captions: str = "txt") -> Path:
    members = []
    for key in keys:
        text = f"caption {key}" if captions == "txt" else json.dumps({"alt": ["x", key]})
        members += [(f"{key}.jpg", f"image {key}".encode()), (f"{key}.{captions}", text.encode())]
    return write_tar(path, members)


def run(
    run_dir: Path,
    force: Remake = Remake.NOTHING,
    workers: int = 1,
    bad: float = 0.01,
    **sources: Any,
) -> SampleIndex:
    """Indexes ``name=shards`` or ``name=(shards, captions)``; ``bad``: data.max_bad_fraction."""
    tree = {
        name: {"shards": value[0], "captions": value[1]}
        if isinstance(value, tuple)
        else {"shards": value}
        for name, value in sources.items()
    }
    data = {"sources": tree, "index_workers": workers, "max_bad_fraction": bad}
    options = {"run_dir": str(run_dir), "data": data}
    return index.run(config.from_tree(options), SINGLE, force=force)


def all_keys(found: SampleIndex) -> list[str]:
    return found.keys(range(len(found)))


def files(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir())}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    for number in range(4):
        make_shard(folder / f"{number:02d}.tar", f"{number}a", f"{number}b")
    return folder


# --- a fresh index ----------------------------------------------------------------------------


def test_samples_of_all_sources_in_configured_order(tmp_path: Path, shards: Path) -> None:
    make_shard(tmp_path / "other" / "x.tar", "0a", captions="json")
    found = run(
        tmp_path / "run",
        z=str(shards / "{00..01}.tar"),
        a=(str(tmp_path / "other/*.tar"), "json:alt"),
    )
    assert all_keys(found) == ["z/0a", "z/0b", "z/1a", "z/1b", "a/0a"]
    assert found.num_captions.tolist() == [1, 1, 1, 1, 2]
    assert [(s.source, s.captions) for s in found.shards] == [
        ("z", "txt"), ("z", "txt"), ("a", "json:alt"),
    ]  # fmt: skip
    data = Path(found.shards[2].path).read_bytes()
    assert data[found.image_offset[4] :][: found.image_size[4]] == b"image 0a"
    counts = read_manifest(tmp_path / "run" / "index", KIND).counts
    assert (counts["samples"], counts["captions"], counts["shards"]) == (5, 6, 3)
    own = {"captions": "json:alt", "shards": 1, "samples": 1, "without_caption": 0}
    assert counts["sources"]["a"] == own
    assert counts["findings"] == {}


def test_what_is_left_out_is_counted_listed_and_logged_up_to_a_bound(
    tmp_path: Path, shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_shard(shards / "04.tar", "0a", "4a")  # 0a is in shard 00 as well, with the same bytes
    cut = make_shard(shards / "05.tar", "5a", "5b")
    cut.write_bytes(cut.read_bytes()[: 512 * 5 + 3])  # within 5b's image
    absurd = hostile_tars.header(size=hostile_tars.base_256(-1024))
    good = (shards / "00.tar").read_bytes()
    (shards / "06.tar").write_bytes(absurd + good)
    (shards / "07.tar").write_bytes(hostile_tars.member("7.jpg", b"i") + absurd + good)
    source = str(shards / "*.tar")
    with pytest.raises(ValueError, match="3 of 8 shards") as caught:
        run(tmp_path / "run", s=source)
    for word in ("data.max_bad_fraction=0.01 allows 0", str(cut), f"{shards}/06.tar"):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()
    with caplog.at_level(logging.INFO, logger="mclclip"):
        found = run(tmp_path / "run", s=source, bad=0.4)
    assert all_keys(found)[-4:] == ["s/3b", "s/4a", "s/5a", "s/7"]
    assert [(s.start, s.stop) for s in found.shards][-4:] == [(8, 9), (9, 10), (10, 10), (10, 11)]
    assert read_manifest(found.directory, KIND).counts["findings"] == {
        "copied_sample": {"count": 1, "examples": ["s/0a"]},
        "truncated_shard": {"count": 1, "examples": [str(cut)]},
        "damaged_shard": {"count": 1, "examples": [f"{shards}/07.tar"]},
        "no_caption": {"count": 1, "examples": ["s/7"]},
        "unreadable_shard": {"count": 1, "examples": [f"{shards}/06.tar"]},
    }
    assert "11 samples with 10 captions in 8 shards" in caplog.text
    assert "(copied_sample), e.g. s/0a" in caplog.text


def test_a_shard_is_in_one_source(tmp_path: Path, shards: Path) -> None:
    with pytest.raises(ValueError, match=r"t\.shards and data\.sources\.s\.shards name .*01\.tar"):
        run(tmp_path / "run", s=str(shards / "0[01].tar"), t=str(shards / "0[123].tar"))
    other = (str(shards / "01.tar"), "lines")
    assert len(run(tmp_path / "run", s=str(shards / "0[01].tar"), t=other).shards) == 3


# --- expansion --------------------------------------------------------------------------------


def names(folder: Path, patterns: str | list[str]) -> list[str]:
    return [Path(path).name for path in shard_paths.expand_shards(patterns, "o")]


def test_expansion(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = ["00.tar", "01.tar", "02.tar", "03.tar"]
    assert names(shards, str(shards / "{00..03}.tar")) == everything
    assert names(shards, str(shards / "0?.tar")) == everything
    assert names(shards, str(shards.parent / "**/0*.tar")) == everything
    listed = [f"{shards}/03.tar", f"{shards}/{{00,02}}.tar"]
    assert names(shards, listed) == ["00.tar", "02.tar", "03.tar"]
    listing = shards / "list.txt"
    listing.write_text(f"# two of them\n{shards}/{{00..01}}.tar\n\n{shards}/03.tar\n")
    assert names(shards, f"@{listing}") == ["00.tar", "01.tar", "03.tar"]
    listing.write_text("\n")
    with pytest.raises(FileNotFoundError, match="names no shard"):
        names(shards, f"@{listing}")
    with pytest.raises(ValueError, match=r"names .*00\.tar twice"):
        names(shards, [f"{shards}/00.tar", f"{shards}/../{shards.name}/0?.tar"])
    for patterns in (str(listing), f"{shards}/lis*.txt", [f"{shards}/00.tar", str(listing)]):
        with pytest.raises(ValueError, match=f"write @{listing}"):
            names(shards, patterns)
    assert names(shards, f"{shards}/00.tar::{shards}/0[12].tar") == everything[:3]
    monkeypatch.setenv("WDS_where", str(shards))
    assert names(shards, "${where}/00.tar") == ["00.tar"]
    monkeypatch.chdir(shards)
    assert shard_paths.expand_shards("00.tar", "o") == [str(shards / "00.tar")]
    with pytest.raises(FileNotFoundError, match="no list of shards at .*none.txt"):
        names(shards, f"@{shards}/none.txt")
    (shards / "09.tar").symlink_to("nowhere.tar")
    for pattern in ("0*.tar", "{00,09}.tar", "**/0*.tar"):
        with pytest.raises(FileNotFoundError, match="09"):
            names(shards, f"{shards}/{pattern}")


@pytest.mark.parametrize("name", ["{00..03}.tar", "a{.tar", "${x}.tar", "a::b.tar", "a[1].tar"])
def test_a_path_that_exists_is_taken_as_it_is(shards: Path, name: str) -> None:
    make_shard(shards / name, "x")
    assert names(shards, f"{shards}/{name}") == [name]
    listing = shards / "list.txt"
    listing.write_text(f"{shards}/{name}\n")
    assert names(shards, f"@{listing}") == [name]
    make_shard(shards / "{x,y}" / name, "x")
    assert shard_paths.expand_shards(f"{shards}/{{x,y}}/*.tar", "o") == [f"{shards}/{{x,y}}/{name}"]


def test_colons_inside_a_url_separate_no_patterns() -> None:
    for text, urls in (
        ("http://[::1]:9/x.tar?sig=a::b", ["http://[::1]:9/x.tar?sig=a::b"]),
        ("http://h/{x,y}.tar::s3://b/z.tar", ["http://h/x.tar", "http://h/y.tar", "s3://b/z.tar"]),
    ):
        assert shard_paths.expand_shards(text, "o") == urls


@pytest.mark.parametrize(
    ("pattern", "error", "message"),
    [
        ("{00..05}.tar", FileNotFoundError, r"o: 2 of the 6 paths of .* such as .*/04\.tar"),
        ("", FileNotFoundError, r"is a folder: use .*/\*\.tar"),
        ("{00..01.tar", ValueError, "does not expand"),
        ("${no_such_variable}.tar", ValueError, "does not expand.*no_such_variable"),
    ],
)
def test_patterns_that_fail(
    shards: Path, pattern: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        names(shards, f"{shards}/{pattern}".rstrip("/"))


# --- wrong input leaves nothing behind --------------------------------------------------------


def test_samples_without_captions_are_kept_and_counted(
    tmp_path: Path, shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    none = run(tmp_path / "none", s=(str(shards / "*.tar"), "json:caption"))
    message = r"stage 1 \(info_nce\) reads captions, and none of the 8 samples .* has one: set data"
    with pytest.raises(ValueError, match=message):
        none.without_caption("stage 1 (info_nce)")
    assert none.digest != run(tmp_path / "all", s=str(shards / "*.tar")).digest  # of the same keys
    make_shard(tmp_path / "bare" / "x.tar", "xa", captions="json")
    sources = {"s": str(shards / "*.tar"), "t": (str(tmp_path / "bare" / "x.tar"), "json:other")}
    found = run(tmp_path / "run", **sources)
    assert found.num_captions.tolist() == [1] * 8 + [0] and all_keys(found)[-1] == "t/xa"
    assert found.caption_start.tolist() == [*range(9), 8]
    counts = read_manifest(found.directory, KIND).counts
    assert (counts["samples"], counts["captions"], counts["without_caption"]) == (9, 8, 1)
    assert [counts["sources"][name]["without_caption"] for name in "st"] == [0, 1]
    assert counts["findings"] == {"no_caption": {"count": 1, "examples": ["t/xa"]}}
    assert "no sample of source t has a caption in json:other" in caplog.text
    assert "1 samples without a caption, kept: what needs captions leaves them out" in caplog.text
    assert found.without_caption("stage 1").tolist() == [8]
    # New shards come after them as after any others.
    make_shard(shards / "99.tar", "9a")
    more = run(tmp_path / "run", **sources)
    assert all_keys(more)[-2:] == ["t/xa", "s/9a"] and more.num_captions.tolist()[-2:] == [0, 1]


@pytest.mark.parametrize(("kind", "lines"), [("nt_xent", 0), ("info_nce", 2)])
def test_captions_that_no_training_reads_are_not_missed(
    tmp_path: Path, kind: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    make_shard(tmp_path / "x.tar", "xa")
    sources = {"s": {"shards": str(tmp_path / "x.tar"), "captions": "json:other"}}
    options = {"run_dir": str(tmp_path / "run"), "data": {"sources": sources}}
    config_of = config.from_tree(options | {"train": {"objective": {"kind": kind}}})
    index.run(config_of, SINGLE)
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == lines and all("caption" in line for line in told)


def test_a_compressed_shard_leaves_what_was_indexed(tmp_path: Path, shards: Path) -> None:
    """Also where a process of its own reads it."""
    first = run(tmp_path / "run", s=f"{shards}/*.tar")
    before = files(first.directory)
    (shards / "04.tar").write_bytes(b"\x1f\x8b\x08 rest")
    with pytest.raises(ValueError, match=r"04\.tar is compressed with gzip.*Decompress"):
        run(tmp_path / "run", s=f"{shards}/*.tar", workers=2)
    assert files(first.directory) == before


# --- again ------------------------------------------------------------------------------------


def test_new_shards_are_appended_and_ids_stay(tmp_path: Path, shards: Path) -> None:
    cut = make_shard(shards / "02.tar", "2a", "2b")
    cut.write_bytes(cut.read_bytes()[: 512 * 4])
    first = run(tmp_path / "run", s=f"{shards}/*.tar", bad=0.3)
    first.add_bad({0: "broken"})
    keys = all_keys(first)
    make_shard(shards / "00-earlier.tar", "new", "0a")
    make_shard(tmp_path / "other" / "0.tar", "0a")
    sources = {"a": f"{tmp_path}/other/*.tar", "s": f"{shards}/*.tar"}
    second = run(tmp_path / "run", bad=0.3, **sources)
    assert all_keys(second) == [*keys, "a/0a", "s/new"]
    assert second.digest != first.digest
    assert second.bad_ids().tolist() == [0]
    assert second.shards[:4] == first.shards
    assert [Path(s.path).name for s in second.shards[4:]] == ["0.tar", "00-earlier.tar"]
    findings = read_manifest(second.directory, KIND).counts["findings"]
    counts = {reason: entry["count"] for reason, entry in findings.items()}
    assert counts == {"copied_sample": 1, "truncated_shard": 1}
    # The index that was open still reads its own rows.
    assert all_keys(first) == keys


def test_killed_while_written_is_made_again_in_its_order(tmp_path: Path, shards: Path) -> None:
    run(tmp_path / "run", s=f"{shards}/0[23].tar")
    grown = run(tmp_path / "run", s=f"{shards}/*.tar")
    keys = all_keys(grown)
    assert keys[0] == "s/2a"
    (grown.directory / "manifest.json").unlink()
    (grown.directory / "samples.arrow").unlink()
    (grown.directory / ".samples.arrow.tmp").write_bytes(b"half")
    again = run(tmp_path / "run", s=f"{shards}/*.tar")
    assert all_keys(again) == keys
    assert not list(again.directory.glob(".*"))


def _change_size(shards: Path) -> None:
    make_shard(shards / "01.tar", "1a", "1b", "1c", "1d", "1e", "1f", "1g", "1h", "1i", "1j", "1k")


@pytest.mark.parametrize(
    ("change", "pattern", "captions", "message"),
    [
        (_change_size, "*.tar", "txt", r"01\.tar .*had [\d,]+ bytes when it was indexed"),
        (lambda s: (s / "01.tar").unlink(), "*.tar", "txt", r"01\.tar .*on disk"),
        (lambda s: None, "0[023].tar", "txt", r"01\.tar .*is not in data\.sources"),
        (lambda s: None, "*.tar", "json:alt", "captions=txt, now json:alt"),
    ],
)
def test_changed_shards_stop_until_forced(
    tmp_path: Path, shards: Path, change: Any, pattern: str, captions: str, message: str
) -> None:
    for number in range(4):  # shards that have captions of both kinds
        write_tar(shards / f"{number:02d}.tar", [(f"{number}a.json", b'{"alt": "x"}')], mode="a")
    first = run(tmp_path / "run", s=f"{shards}/*.tar")
    before = files(first.directory)
    change(shards)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        run(tmp_path / "run", s=(f"{shards}/{pattern}", captions))
    assert "--force" in str(caught.value) and "\n" not in str(caught.value)
    assert files(first.directory) == before
    forced = run(tmp_path / "run", s=(f"{shards}/{pattern}", captions), force=Remake.ALL)
    assert forced.digest != first.digest
    assert files(tmp_path / "run" / "index.old-1") == before


@pytest.mark.parametrize(
    ("names", "change"),
    [(["00", "02", "03", "01"], "moved"), (["02", "00"], "copied"), (["02", "00"], "made again")],
)
def test_a_grown_index_keeps_its_order(
    tmp_path: Path, shards: Path, names: list[str], change: str
) -> None:
    """Shards 01 and 03 came later; then all lie in another folder."""
    for known in range(1, len(names) + 1):
        listed = [f"{shards}/{name}.tar" for name in sorted(names[:known])]
        first = run(tmp_path / "run", s=listed)
    other, force = shards, Remake.ALL
    if change != "made again":
        other, force = tmp_path / "other" / "folder", Remake.NOTHING
        other.mkdir(parents=True)
        (tmp_path / "run" / "stage_0").mkdir()  # the run has begun
        move = shutil.move if change == "moved" else shutil.copy
        for name in names:
            move(shards / f"{name}.tar", other / f"{name}.tar")
    again = run(tmp_path / "run", s=[f"{other}/{name}.tar" for name in sorted(names)], force=force)
    assert [Path(shard.path) for shard in again.shards] == [other / f"{n}.tar" for n in names]
    assert again.digest == first.digest and all_keys(again) == all_keys(first)
    before = files(again.directory)
    run(tmp_path / "run", s=f"{other}/0[{''.join(n[1] for n in names)}].tar")
    assert files(again.directory) == before


@pytest.mark.parametrize(
    ("before", "now"),
    [(["en/0", "de/0"], ["en/v2/0", "de/v2/0"]), (["q/p/0"], ["q/p/0", "q/a/p/0"])],
)
def test_moved_shards_of_one_name_and_size_are_told_apart(
    tmp_path: Path, before: list[str], now: list[str]
) -> None:
    """By their content: folders have other names or levels, or new shards are alike."""
    for number, name in enumerate(now):
        make_shard(tmp_path / "new" / f"{name}.tar", f"{number}a")
    for old, new in zip(before, now, strict=False):
        (tmp_path / "old" / old).parent.mkdir(parents=True)
        shutil.copy(tmp_path / "new" / f"{new}.tar", tmp_path / "old" / f"{old}.tar")
    first = run(tmp_path / "run", s=[str(tmp_path / "old" / f"{name}.tar") for name in before])
    again = run(tmp_path / "run", s=[str(tmp_path / "new" / f"{name}.tar") for name in now])
    assert all_keys(again)[: len(first)] == all_keys(first)
    old, new = ([shard.digest for shard in of.shards] for of in (first, again))
    assert new[: len(old)] == old and len(new) == len(now)


def test_shards_that_come_after_the_run_began_are_refused(tmp_path: Path, shards: Path) -> None:
    first = run(tmp_path / "run", s=f"{shards}/0[012].tar")
    before = files(first.directory)
    (tmp_path / "run" / "stage_0").mkdir()
    with pytest.raises(ValueError, match=r"such as .*/03\.tar"):
        run(tmp_path / "run", s=f"{shards}/*.tar")
    assert files(first.directory) == before
    (first.directory / "manifest.json").unlink()  # killed while it was written anew
    with pytest.raises(ValueError, match=r"such as .*/03\.tar"):
        run(tmp_path / "run", s=f"{shards}/*.tar")
    run(tmp_path / "run", s=f"{shards}/0[012].tar")
    assert len(run(tmp_path / "run", s=f"{shards}/*.tar", force=Remake.UNFIT).shards) == 4


def test_a_run_does_not_write_to_the_index_of_another(tmp_path: Path, shards: Path) -> None:
    first = run(tmp_path / "run", s=f"{shards}/*.tar")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "index").symlink_to(first.directory)
    os.utime(shards / "00.tar", (1, 1))  # read again, and then not noted
    before = files(first.directory)
    run(tmp_path / "linked", s=f"{shards}/*.tar")
    shutil.move(shards, tmp_path / "moved")
    with pytest.raises(ValueError, match="link to the index of another run"):
        run(tmp_path / "linked", s=f"{tmp_path}/moved/*.tar")
    assert files(first.directory) == before
    own = run(tmp_path / "linked", s=f"{tmp_path}/moved/*.tar", force=Remake.ALL)
    assert own.digest == first.digest and not (tmp_path / "linked" / "index").is_symlink()
    assert files(first.directory) == before


# --- keys that start again ----------------------------------------------------------------------


def numbered(path: Path, number: int, name: str = "") -> Path:
    """A shard of samples 0 and 1, whose keys every shard has."""
    members = [(f"{n}.jpg", f"{number} {n} {name}".encode()) for n in range(2)]
    members += [(f"{n}.txt", f"caption {number} {n} {name}".encode()) for n in range(2)]
    return write_tar(path, members)


def test_keys_that_start_again_in_every_shard_get_its_name(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"part{number % 2}").mkdir(exist_ok=True)
        numbered(tmp_path / f"part{number % 2}" / f"{number}.tar", number)
    make_shard(tmp_path / "t.tar", "0a", "0b")
    sources = {"s": f"{tmp_path}/part*/*.tar", "t": f"{tmp_path}/t.tar"}
    found = run(tmp_path / "run", **sources)
    names = ("part0/0", "part0/2", "part1/1")
    assert all_keys(found) == [*(f"s/{name}/{n}" for name in names for n in "01"), "t/0a", "t/0b"]
    assert read_manifest(found.directory, KIND).counts["findings"] == {}
    assert found.ids_of(["s/part1/1/1"]).tolist() == [5]
    # A shard that comes later, whose keys were there before, too.
    numbered(tmp_path / "part1" / "3.tar", 3)
    assert len(run(tmp_path / "run", **sources)) == 10


def scan_all(folder: Path, pattern: str) -> SampleIndex:
    """Indexes again with checksums of pixels, for which all shards are read."""
    tree = {"sources": {"s": {"shards": f"{folder}/{pattern}"}}, "verify": "full"}
    options = {"run_dir": str(folder / "run"), "data": tree | {"index_workers": 1}}
    return index.run(config.from_tree(options), SINGLE)


def test_keys_do_not_depend_on_when_a_shard_came(tmp_path: Path) -> None:
    """Nor does a scan of all shards, as for checksums of pixels, give other ones."""
    for number, name in enumerate("ab"):
        numbered(tmp_path / name / "000.tar", number)
    run(tmp_path / "run", s=f"{tmp_path}/?/*.tar")
    make_shard(tmp_path / "c" / "000.tar", "x")  # whose key was not there before
    grown = all_keys(run(tmp_path / "run", s=f"{tmp_path}/?/*.tar"))
    assert grown[-1] == "s/c/000/x"
    assert grown == all_keys(run(tmp_path / "fresh", s=f"{tmp_path}/?/*.tar"))
    assert all_keys(scan_all(tmp_path, "?/*.tar")) == grown


def test_a_scan_of_all_shards_keeps_keys_of_before_they_started_again(tmp_path: Path) -> None:
    numbered(tmp_path / "0.tar", 0)
    first = all_keys(run(tmp_path / "run", s=f"{tmp_path}/*.tar"))
    numbered(tmp_path / "1.tar", 1)
    grown = all_keys(run(tmp_path / "run", s=f"{tmp_path}/*.tar"))
    assert grown == [*first, "s/1/0", "s/1/1"] and all_keys(scan_all(tmp_path, "*.tar")) == grown


def test_a_shard_outside_the_folder_that_names_start_from_is_refused(tmp_path: Path) -> None:
    for number in range(2):
        numbered(tmp_path / "in" / f"{number}.tar", number)
    run(tmp_path / "run", s=f"{tmp_path}/in/*.tar")
    numbered(tmp_path / "out" / "0.tar", 2)
    sources = {"s": [f"{tmp_path}/in/*.tar", f"{tmp_path}/out/0.tar"]}
    with pytest.raises(ValueError, match="--force"):
        run(tmp_path / "run", **sources)
    found = run(tmp_path / "run", force=Remake.ALL, **sources)
    assert all_keys(found)[-1] == "s/out/0/1"


def test_lines_of_texts_are_captions_where_that_is_said(tmp_path: Path) -> None:
    members = [(f"{n}.{kind}", b"a\nb\n") for n in range(12) for kind in ("jpg", "txt")]
    write_tar(tmp_path / "0.tar", members)
    shards = f"{tmp_path}/0.tar"
    one, lines = run(tmp_path / "x", s=shards), run(tmp_path / "y", s=(shards, "lines"))
    assert one.num_captions.tolist() == [1] * 12 and lines.num_captions.tolist() == [2] * 12
    told = [read_manifest(found.directory, KIND).counts["findings"] for found in (one, lines)]
    assert [*told[0]] == ["several_lines:2"] and told[1] == {}
    with pytest.raises(ValueError, match="lines"):
        read_shards(tmp_path, "txt")
    assert len(read_shards(tmp_path, "lines")[0]) == 12
