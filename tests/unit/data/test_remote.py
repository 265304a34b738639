"""Shards behind urls: the same samples as from a disk, and faults that are never taken for data."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mclclip.data import remote as remote_module
from mclclip.data.batches import Loader
from mclclip.data.options import DataConfig
from mclclip.data.remote import (
    GAP_BYTES,
    ChangedShard,
    Remote,
    RemoteOptions,
    StoredFile,
    check_protocol,
    open_whole,
)
from mclclip.data.samples import Sample, TarDataset
from mclclip.data.shard_reader import BLOCK_BYTES, ShardCache, ShardReader, read_copy
from mclclip.index import expand_shards
from tests.shard_server import Handler, ShardServer, serving
from tests.tars import write_tar
from tests.unit.data.test_samples import make_index, to_tensor, tokenize
from tests.unit.test_index import all_keys, make_shard
from tests.unit.test_index import run as run_index

pytest.importorskip("aiohttp", reason="shards behind http need aiohttp (the extra 'remote')")
DATA = random.Random(0).randbytes(3 * GAP_BYTES + 12_345)
FAST = RemoteOptions(retries=4, timeout_s=60.0)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(remote_module, "_LONGEST_PAUSE_S", 0.02)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "a.tar").write_bytes(DATA)
    with serving(folder) as started:
        yield started


def stat(server: ShardServer, name: str = "a.tar") -> StoredFile:
    (found,) = Remote(FAST).stat([server.url(name)])
    assert found is not None
    return found


def ranges(server: ShardServer, number: int = 40, tag: str = "") -> list[tuple[str, int, int, str]]:
    rng = random.Random(1)
    starts = [rng.randrange(len(DATA) - 1) for _ in range(number)]
    url = server.url("a.tar")
    return [(url, s, rng.randint(0, min(5000, len(DATA) - s)), tag) for s in starts]


def read(remote: Remote, asked: list[tuple[str, int, int, str]]) -> None:
    found = remote.read_ranges(asked)
    assert found == [DATA[start : start + size] for _, start, size, _ in asked]


def test_a_url_is_looked_at_and_read_in_any_order(server: ShardServer) -> None:
    assert stat(server).size == len(DATA) and stat(server).tag.startswith('"')
    read(Remote(FAST), ranges(server, tag=stat(server).tag))
    assert Remote(FAST).read_ranges([]) == []


def test_neighbours_come_by_one_request(server: ShardServer) -> None:
    url = server.url("a.tar")
    read(Remote(FAST), [(url, 100, 10, ""), (url, 0, 10, ""), (url, 110 + GAP_BYTES, 7, "")])
    assert server.seen["GET"] == 1
    read(Remote(FAST), [(url, 0, 10, ""), (url, 11 + GAP_BYTES, 10, "")])
    assert server.seen["GET"] == 3


@pytest.mark.parametrize("fault", ["fail", "cut"])
@pytest.mark.parametrize("times", [1, 4])
def test_what_passes_is_tried_again(server: ShardServer, fault: str, times: int) -> None:
    setattr(server, fault, times)
    remote = Remote(RemoteOptions(retries=4, timeout_s=60.0, in_flight=1))
    read(remote, ranges(server))
    assert remote.tried_again == times and server.takes(fault) is False


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_shard_that_stays_dead_is_one_error_that_names_it(
    server: ShardServer, status: int
) -> None:
    server.fail, server.status = -1, status
    with pytest.raises(OSError, match=rf"a\.tar could not be read after 5 .*{status}"):
        Remote(FAST).read_ranges(ranges(server, 1))
    assert server.seen["GET"] == 5


def test_a_server_that_is_silent_or_gone_is_not_waited_for_without_end(
    server: ShardServer, tmp_path: Path
) -> None:
    server.silent = True
    impatient = Remote(RemoteOptions(retries=1, timeout_s=0.3))
    with pytest.raises(OSError, match="could not be read after 2 attempts"):
        impatient.read_ranges(ranges(server, 1))
    with serving(tmp_path) as other:
        url = other.url("x.tar")
    for call in (impatient.stat, lambda urls: impatient.read_ranges([(urls[0], 0, 9, "")])):
        with pytest.raises(OSError, match="could not be read after 2 attempts"):
            call([url])


def test_errors_that_no_attempt_mends_are_not_tried_again(server: ShardServer) -> None:
    missing = server.url("b.tar")
    with pytest.raises(FileNotFoundError, match=r"b\.tar is not there"):
        Remote(FAST).stat([missing])
    with pytest.raises(FileNotFoundError, match=r"b\.tar is not there"):
        Remote(FAST).read_ranges([(missing, 0, 5, "")])
    server.fail, server.status = 1, 403
    with pytest.raises(PermissionError, match="credentials"):
        Remote(FAST).read_ranges(ranges(server, 1))
    server.ranges = False
    with pytest.raises(OSError, match="does not serve ranges"):
        Remote(FAST).read_ranges([(server.url("a.tar"), 0, 5, "")])
    assert server.seen["GET"] == 4  # one of them is the second way to look


def test_a_server_without_ranges_is_refused_where_a_small_shard_is_read_whole(
    server: ShardServer, tmp_path: Path
) -> None:
    """As ``index`` reads it, and not one verb later."""
    remote = Remote(FAST)
    (stored,) = remote.stat([server.url("a.tar")])
    assert stored is not None and stored.size > 1
    server.ranges = False
    with open(tmp_path / "copy", "wb") as file:
        with pytest.raises(OSError, match="does not serve ranges"):
            remote.fetch(stored, file)
        server.ranges = True
        remote.fetch(stored, file)
    assert (tmp_path / "copy").stat().st_size == stored.size


@pytest.mark.parametrize(("url", "missing"), [("http://h/a.tar", "aiohttp"), ("s3://b/a", "s3fs")])
def test_a_missing_library_is_one_line_at_once(
    url: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    known = sys.modules["fsspec.registry"]._registry  # classes that were imported before
    monkeypatch.delitem(known, url.partition(":")[0], raising=False)
    remote = Remote(FAST)
    with pytest.raises(OSError, match=r"install the library of .*mclclip\[remote\]"):
        remote.stat([url])
    assert remote.tried_again == 0


def test_the_first_repetition_is_told(
    server: ShardServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.fail = 3
    read(Remote(FAST), ranges(server, 1))
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(told) == 1 and told[0].endswith("a.tar is read again: HTTP status 503")


def test_another_object_behind_a_url_is_never_read(server: ShardServer, tmp_path: Path) -> None:
    was = stat(server)
    (server.folder / "a.tar").write_bytes(DATA[::-1])
    with pytest.raises(ChangedShard, match=r"a\.tar has changed since it was indexed"):
        Remote(FAST).read_ranges(ranges(server, tag=was.tag))
    with pytest.raises(ChangedShard), open(tmp_path / "copy", "wb") as copy:
        Remote(FAST).fetch(was, copy)


def test_a_read_that_is_tried_again_is_still_of_the_object_that_was_indexed(
    server: ShardServer,
) -> None:
    url, tag, changed = server.url("a.tar"), stat(server).tag, DATA[::-1]

    def first() -> None:  # which is cut; the object is another before the second
        server.after_look = lambda: (server.folder / "a.tar").write_bytes(changed)

    server.cut, server.after_look = 1, first
    with pytest.raises(ChangedShard, match=r"a\.tar has changed since it was indexed"):
        Remote(FAST).read_ranges([(url, 100, 50, tag)])
    assert server.seen["GET"] == 2 and not server.takes("cut")


@pytest.mark.parametrize("block_bytes", [1000, len(DATA) - 1, len(DATA), len(DATA) + 1])
def test_a_whole_shard_comes_in_blocks(
    server: ShardServer, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "BLOCK_BYTES", block_bytes)
    server.cut = 1
    with open_whole(stat(server), Remote(FAST)) as file:
        assert file.read() == DATA


@pytest.mark.parametrize(
    "url",
    [
        "S3://bucket/a.tar",
        "az://b/a.tar",
        "file:///etc/passwd",
        "memory://a.tar",
        "local://a",
        "s3://b/a.tar::x",
        "pipe:cat a",
    ],
)
def test_other_protocols_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="neither a local path nor a url that is read"):
        check_protocol(url, "data.sources.x.shards")


@pytest.mark.parametrize("user", ["me:s3cret@", "s3cret@", ":s3cret@"])
def test_secrets_are_neither_taken_nor_shown(user: str, server: ShardServer) -> None:
    for url in (f"https://{user}host/a.tar", f"ftp://{user}host/a.tar?s3cret"):
        with pytest.raises(ValueError) as raised:
            expand_shards(url, "data.sources.x.shards")
        assert "s3cret" not in str(raised.value) and "host/a.tar" in str(raised.value)
    signed = server.url("b.tar?signature=s3cret")
    with pytest.raises(FileNotFoundError) as gone:
        Remote(FAST).stat([signed])
    assert "s3cret" not in str(gone.value) and "b.tar?..." in str(gone.value)


PAGE = b"<html>sign in</html>".ljust(20_480, b" ")
ANSWERS: dict[str, Callable[[Handler], object]] = {
    "html": lambda h: h.send(200, PAGE, h.command == "GET"),
    "empty": lambda h: h.send(204, b""),
    "loop": lambda h: h.send(301, b"", Location=h.path + "&s3cret"),
    "elsewhere": lambda h: h.send(302, b"", Location="http://127.0.0.1:9/a.tar?s3cret"),
    "odd target": lambda h: h.send(302, b"", Location="ftp://me:s3cret@h/a.tar?s3cret"),
    "longer": lambda h: h.send(206, bytes(50_000), h.command == "GET"),
    "garbage": lambda h: h.wfile.write(b"garbage /a.tar?s3cret\r\n\r\n"),
}
BAD: dict[str, Callable[[ShardServer], object]] = {
    **{
        name: lambda server, answer=answer: setattr(server, "answer", answer)
        for name, answer in ANSWERS.items()
    },
    **{
        str(status): lambda server, status=status: vars(server).update(fail=-1, status=status)
        for status in (403, 500)
    },
    "cut": lambda server: setattr(server, "cut", -1),
    "gone": lambda server: (server.folder / "0.tar").unlink(),
    "packed": lambda server: (server.folder / "0.tar").write_bytes(b"\x1f\x8b" + bytes(510)),
    "torn": lambda server: (server.folder / "0.tar").write_bytes(b"no tar" * 200),
    "replaced": lambda server: make_shard(server.folder / "0.tar", "c", "d"),
}


def told(call: Callable[[], object]) -> str:
    """The traceback of what a call raises, with all causes."""
    try:
        call()
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return ""


@pytest.mark.parametrize("fault", list(BAD))
def test_no_message_about_a_bad_shard_holds_the_secret_of_its_url(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    caplog.set_level("DEBUG", "mclclip")
    folder = tmp_path / "served"
    make_shard(folder / "0.tar", "a", "b")
    with serving(folder) as server:
        url = server.url("0.tar?me=1&signature=s3cret")
        found = run_index(tmp_path / "run", s=url)
        served = TarDataset(found, DataConfig(remote=FAST), to_tensor)
        BAD[fault](server)
        fresh = told(lambda: run_index(tmp_path / "fresh", s=url, bad=1.0))
        known = told(lambda: run_index(tmp_path / "run", s=url))
        reading = told(lambda: served.read_many([0, 1]))
    assert "0.tar?..." in fresh or "0.tar?..." in caplog.text or fault == "replaced"
    assert "s3cret" not in fresh + known + reading + caplog.text
    held = [path.name for path in tmp_path.rglob("*") if path.is_file() and b"s3cret" in
            path.read_bytes()]  # fmt: skip
    assert set(held) == {"shards.json"}


def test_braces_expand_urls_and_http_has_no_globs() -> None:
    assert expand_shards("https://x.org/{00..02}.tar?k=1", "o") == [
        f"https://x.org/0{n}.tar?k=1" for n in range(3)
    ]
    with pytest.raises(ValueError, match="HTTP has no listings: use braces"):
        expand_shards("https://x.org/*.tar", "o")


# --- as a data set -----------------------------------------------------------------------------


def datasets(tmp_path: Path, **options: Any) -> tuple[TarDataset, Any]:
    """The samples of one index, from a disk and with a function that gives them from a server."""
    index = make_index(tmp_path)
    local = TarDataset(index, DataConfig(), to_tensor, tokenizer=tokenize)

    def over(server: ShardServer) -> TarDataset:
        over_urls = DataConfig(remote=RemoteOptions(retries=4, timeout_s=60.0, **options))
        served = TarDataset(index, over_urls, to_tensor, tokenizer=tokenize)
        files = [stat(server, Path(shard.path).name) for shard in index.shards]
        served.reader = ShardReader(files, over_urls)
        return served

    return local, over


def assert_equal(local: TarDataset, served: TarDataset, workers: int = 0) -> None:
    ids = torch.randperm(len(local), generator=torch.Generator().manual_seed(0)).tolist()
    batches = [ids[start : start + 7] for start in range(0, len(ids), 7)]
    loader: Loader[list[Sample]] = Loader(
        served, batches, num_workers=workers, describe=lambda *_: "batch", batched=True
    )
    for asked, found in zip(batches, loader, strict=True):
        for wanted, sample in zip(local.__getitems__(asked), found, strict=True):
            assert isinstance(wanted, Sample) and isinstance(sample, Sample)
            assert wanted.sample_id == sample.sample_id
            assert torch.equal(wanted.views[0], sample.views[0])
            assert wanted.text is not None and sample.text is not None
            assert torch.equal(wanted.text, sample.text)
    assert served.captions_of(ids) == local.captions_of(ids)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_those_on_disk_under_faults(tmp_path: Path, workers: int) -> None:
    local, over = datasets(tmp_path)
    with serving(tmp_path / "shards") as server:
        served = over(server)
        assert_equal(local, served)  # its connections must not be those of forked workers
        server.fail, server.cut = 2, 2
        assert_equal(local, served, workers)
        assert not server.takes("fail") and not server.takes("cut")
        # Workers have left alone what this process waits for (with 0 they are this process).
        assert served.reader._remote.tried_again == (0 if workers else 4)


def test_keys_name_no_secret_of_a_signed_url(server: ShardServer, tmp_path: Path) -> None:
    for name in "ab":
        write_tar(server.folder / f"{name}.tar", [("0.jpg", name.encode()), ("0.txt", b"x")])
    urls = [server.url(f"{name}.tar?signature=s3cret") for name in "ab"]
    assert all_keys(run_index(tmp_path / "run", s=urls)) == ["s/a/0", "s/b/0"]


def test_the_index_remembers_what_a_url_was(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    make_shard(folder / "0.tar", "a", "b")
    make_shard(folder / "1.tar", "c")
    with serving(folder) as server:
        server.fail = 2
        urls = server.url("{0..1}.tar")
        found = run_index(tmp_path / "run", s=urls, workers=2)
        assert all_keys(found) == ["s/a", "s/b", "s/c"]
        assert [shard.tag for shard in found.shards] == [
            stat(server, "0.tar").tag,
            stat(server, "1.tar").tag,
        ]
        run_index(tmp_path / "run", s=urls)
        make_shard(folder / "1.tar", "d")
        with pytest.raises(ValueError, match=r"1\.tar .* had the ETag .* restore it, or index"):
            run_index(tmp_path / "run", s=urls)
        assert all_keys(run_index(tmp_path / "run", s=urls, force=True))[-1] == "s/d"
        (folder / "0.tar").unlink()
        with pytest.raises(FileNotFoundError, match=r"0\.tar is not there"):
            run_index(tmp_path / "run", s=urls)
        with pytest.raises(ValueError, match=r"0\.tar .* is not in data\.sources any more"):
            run_index(tmp_path / "run", s=server.url("1.tar"))


# --- the cache ---------------------------------------------------------------------------------


def test_a_cache_fills_while_shards_are_read(tmp_path: Path) -> None:
    local, over = datasets(tmp_path, cache=str(tmp_path / "cache"))
    with serving(tmp_path / "shards") as server:
        served = over(server)
        assert_equal(local, served)
        fetched(served.reader._cache)
        before = server.seen["GET"]
        assert_equal(local, served)
        assert_equal(local, served, workers=2)
        assert server.seen["GET"] == before
    assert len(list((tmp_path / "cache").glob("*.tar"))) == len(local.index.shards)


@pytest.mark.parametrize("sums", ["of the shard", "of the damage"])
def test_a_damaged_copy_makes_no_sample_bad(tmp_path: Path, sums: str) -> None:
    """Its note would be compared with the bytes in the store, which are good, and hold for ever."""
    local, over = datasets(tmp_path, cache=str(tmp_path / "cache"))
    with serving(tmp_path / "shards") as server:
        served = over(server)
        assert_equal(local, served)
        fetched(served.reader._cache)
        for path in (tmp_path / "cache").glob("*.tar"):
            copy = bytearray(path.read_bytes())
            size = next(n for n in range(len(copy)) if n + 4 * -(-n // BLOCK_BYTES) == len(copy))
            for shard in local.index.shards:
                if shard.size_bytes == size:
                    for row in range(shard.start, shard.stop):
                        at = int(local.index.image_offset[row])
                        copy[at : at + 8] = bytes(8)
            if sums == "of the damage":  # as where it came damaged from the network
                starts = range(0, size, BLOCK_BYTES)
                blocks = (copy[at : min(at + BLOCK_BYTES, size)] for at in starts)
                copy[size:] = b"".join(zlib.crc32(b).to_bytes(4, "little") for b in blocks)
            path.write_bytes(copy)
        assert_equal(local, over(server))


@pytest.mark.parametrize("damage", ["bit", "cut", "older version"])
def test_a_damaged_copy_is_not_read_and_fetched_again(
    server: ShardServer, tmp_path: Path, damage: str
) -> None:
    options = RemoteOptions(retries=4, timeout_s=5.0, cache=str(tmp_path / "cache"))
    files = [stat(server)]
    first = ShardReader(files, DataConfig(remote=options))
    first.read(0, 0, 1)
    assert first._cache is not None
    fetched(first._cache)
    (copy,) = (tmp_path / "cache").glob("*.tar")
    good = copy.read_bytes()
    reader = ShardReader(files, DataConfig(remote=options))
    assert reader.read(0, 3 * BLOCK_BYTES, 10) == DATA[3 * BLOCK_BYTES :][:10]  # it is open now
    stored = server.seen["GET"]
    bad = bytearray(good)
    bad[40_000] ^= 1
    written = {"bit": bytes(bad), "cut": good[:-1], "older version": DATA}[damage]
    copy.write_bytes(written)
    for one in (reader, ShardReader(files, DataConfig(remote=options))):
        assert one.read(0, 40_000, 9) == DATA[40_000:40_009]
        one.prefetch([(0, 30_000, 20_000)])
        assert one.read(0, 30_000, 20_000) == DATA[30_000:50_000]
        assert one._cache is not None
        fetched(one._cache)
    assert copy.read_bytes() == good and server.seen["GET"] > stored
    reader.read(0, 100_000, 70_000)  # which may have the removed file open
    stored = server.seen["GET"]
    assert reader.read(0, 100_000, 70_000) == DATA[100_000:170_000]
    assert server.seen["GET"] == stored


def test_a_copy_gives_what_its_shard_gives_at_every_edge(
    server: ShardServer, tmp_path: Path
) -> None:
    kept = cache(server, tmp_path / "cache", 10_000_000)
    for size in (1, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 1):
        (server.folder / f"{size}.tar").write_bytes(DATA[:size])
        path = copied(kept, stat(server, f"{size}.tar"))
        assert path is not None
        edges = {0, 1, size // 2, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, size - 1, size}
        with open(path, "rb") as file:
            for start in edges | {size + 9}:
                for wanted in edges:
                    found = read_copy(file.fileno(), size, start, wanted)
                    assert found == DATA[:size][start : start + wanted]


def test_objects_of_equal_size_and_tag_have_copies_of_their_own(
    server: ShardServer, tmp_path: Path
) -> None:
    server.tags = False
    (server.folder / "b.tar").write_bytes(DATA[::-1])
    kept = cache(server, tmp_path / "cache", 10_000_000)
    one, other = stat(server), stat(server, "b.tar")
    assert (one.size, one.tag) == (other.size, other.tag)
    for name, wanted in (("a.tar", DATA), ("b.tar", DATA[::-1])):
        copy = copied(kept, stat(server, name))
        assert copy is not None and copy.read_bytes()[: len(DATA)] == wanted


def cache(server: ShardServer, folder: Path, max_bytes: int) -> ShardCache:
    return ShardCache(folder, max_bytes, Remote(FAST))


def fetched(kept: ShardCache | None) -> None:
    """Waits until all that this process has asked for was fetched or left out."""
    if kept is not None and kept._pid == os.getpid():
        kept._queue.join()


def copied(kept: ShardCache, stored: StoredFile) -> Path | None:
    """The copy of an object that was asked for and has come."""
    kept.path_of(stored)
    fetched(kept)
    return kept.path_of(stored)


@pytest.mark.parametrize("below", ["file", "file/cache"])
def test_a_cache_that_is_no_folder_is_told_with_its_option(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^data.remote.cache=.*/file.* cannot be made \(.*folder"):
        ShardCache(tmp_path / below, 10_000, Remote(FAST))


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix != ".lock")


def test_a_cache_stays_below_its_bound(server: ShardServer, tmp_path: Path) -> None:
    for name in "bcd":
        (server.folder / f"{name}.tar").write_bytes(name.encode() * 1000)
    folder = tmp_path / "cache"
    kept = cache(server, folder, 2500)
    for name in "abcd":
        assert kept.path_of(stat(server, f"{name}.tar")) is None
    fetched(kept)
    assert held(folder) == 2 * 1004  # a is larger than the bound, and d finds no room
    assert kept.path_of(stat(server, "d.tar")) is None
    oldest = kept.path_of(stat(server, "b.tar"))
    assert oldest is not None and oldest.read_bytes()[:-4] == b"b" * 1000
    os.utime(oldest, (0, 0))
    (server.folder / "e.tar").write_bytes(b"e" * 2400)
    large = cache(server, folder, 2500)  # room for it is not made by one old shard alone
    large.path_of(stat(server, "e.tar"))
    fetched(large)
    assert oldest.exists() and held(folder) == 2 * 1004
    later = cache(server, folder, 2500)  # another process, hours later
    copy = copied(later, stat(server, "d.tar"))
    assert copy is not None and copy.read_bytes()[:-4] == b"d" * 1000
    assert not oldest.exists() and held(folder) == 2 * 1004


_KILLED = """
import sys, time
from pathlib import Path
from mclclip.data.remote import Remote, StoredFile
from mclclip.data.shard_reader import ShardCache
cache = ShardCache(Path(sys.argv[1]), 10_000_000, Remote())
cache.path_of(StoredFile(sys.argv[2], int(sys.argv[3]), sys.argv[4]))
while not list(Path(sys.argv[1]).glob("*.part")):
    time.sleep(0.01)
time.sleep(0.1)
print("filling", flush=True)
time.sleep(60)
"""


def test_a_cache_forgets_what_a_killed_process_left(server: ShardServer, tmp_path: Path) -> None:
    server.silent, folder = True, tmp_path / "cache"
    stored = stat(server)
    words = [str(folder), stored.path, str(stored.size), stored.tag]
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, *words], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "filling\n"
        server.silent = False
        other = cache(server, folder, 10_000_000)
        other.path_of(stored)
        fetched(other)  # the part of a living process is left alone
        assert len(list(folder.glob("*.part"))) == 1
        process.kill()
    copy = copied(cache(server, folder, 10_000_000), stored)
    assert copy is not None and copy.read_bytes()[: len(DATA)] == DATA
    assert not list(folder.glob("*.part"))


def test_a_cache_leaves_alone_what_another_process_has_just_begun(tmp_path: Path) -> None:
    one, other = (ShardCache(tmp_path, 10_000, Remote(FAST)) for _ in range(2))
    with one._reserve(tmp_path / "a.tar", 1000) as begun:  # type: ignore[union-attr]
        assert other._reserve(tmp_path / "a.tar", 1000) is None
        assert os.path.samestat(os.stat(tmp_path / "a.part"), os.fstat(begun.fileno()))


def test_a_process_forked_while_a_cache_looks_for_room_does_not_keep_its_lock(
    tmp_path: Path,
) -> None:
    kept = ShardCache(tmp_path, 10_000, Remote(FAST))
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    with kept._locked():
        child.start()
    try:
        with open(tmp_path / "cache.lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        child.kill()
        child.join()


def test_what_a_forked_process_prefetches_it_reads(server: ShardServer) -> None:
    reader = ShardReader([stat(server)], DataConfig(remote=FAST))
    reader._pid = -1  # as after a fork
    reader.prefetch([(0, 0, 100), (0, 200, 100)])
    before = server.seen["GET"]
    assert reader.read(0, 0, 100) + reader.read(0, 200, 100) == DATA[:100] + DATA[200:300]
    assert server.seen["GET"] == before


def test_what_was_begun_is_taken_by_who_asks_for_the_same(server: ShardServer) -> None:
    reader = ShardReader([stat(server)], DataConfig(remote=FAST))
    ranges, far = [(0, 0, 100), (0, 200, 100)], [(0, 900, 10)]
    reader.start_prefetch(ranges)
    reader.prefetch(far)  # something else, which a replaced sample needs meanwhile
    assert reader.read(*far[0]) == DATA[900:910]
    reader.prefetch(ranges)
    before = server.seen["GET"]
    assert [reader.read(*r) for r in ranges] == [DATA[:100], DATA[200:300]]
    assert server.seen["GET"] == before == 2
    server.fail, server.status = -1, 404  # what goes wrong meanwhile is told when it is asked for
    reader.start_prefetch(ranges)
    with pytest.raises(FileNotFoundError, match=r"a\.tar is not there: put it back"):
        reader.prefetch(ranges)
    server.fail = 0
    reader.prefetch(ranges)
    assert reader.read(*ranges[0]) == DATA[:100]


def test_why_a_host_does_not_answer_is_said() -> None:
    with pytest.raises(OSError, match="(?i)connect"):
        Remote(RemoteOptions(retries=0, timeout_s=60.0)).stat(["http://127.0.0.1:9/a.tar"])


def test_a_cache_that_fails_costs_time_alone(
    server: ShardServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    kept, other = cache(server, folder, 10_000_000), server.folder / "b.tar"
    other.write_bytes(b"b" * 1000)
    server.fail, server.status = -1, 403
    assert kept.path_of(stat(server)) is None
    fetched(kept)
    assert "a shard is not kept" in caplog.text and held(folder) == 0
    server.fail = 0
    copied(kept, stat(server, "b.tar"))
    assert held(folder) == 1004  # one shard that cannot be had is not the end of the cache
    (folder / "cache.lock").unlink()
    (folder / "cache.lock").mkdir()
    (server.folder / "c.tar").write_bytes(b"c")
    copied(kept, stat(server, "c.tar"))
    assert caplog.text.count("is not used any more") == 1
    assert kept.path_of(stat(server, "b.tar")) is None


# --- an object store -----------------------------------------------------------------------------


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket of moto's S3 as boto3 gives it; s3fs finds it through the environment."""
    pytest.importorskip("s3fs", reason="shards of S3 need s3fs (the extra 'remote')")
    server_of = pytest.importorskip("moto.server", reason="moto's S3 is not installed")
    import boto3

    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}
    for name, value in (names | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}).items():
        monkeypatch.setenv(name, value)
    try:
        found = boto3.resource("s3", region_name="us-east-1").Bucket("shards")
        found.create()
        yield found
    finally:
        server.stop()


def test_s3(bucket: Any, tmp_path: Path) -> None:
    local = tmp_path / "local"
    for name, keys in (("0.tar", "ab"), ("1.tar", "c")):
        bucket.upload_file(str(make_shard(local / name, *keys)), f"train/{name}")
    found = run_index(tmp_path / "run", s="s3://shards/train/*.tar")
    assert all_keys(found) == ["s/a", "s/b", "s/c"]
    assert [shard.path for shard in found.shards] == [f"s3://shards/train/{n}.tar" for n in (0, 1)]
    reader = ShardReader([shard.stored for shard in found.shards], DataConfig(remote=FAST))
    for number, name in enumerate(("0.tar", "1.tar")):
        wanted = (local / name).read_bytes()
        assert reader.read(number, 512, 700) == wanted[512 : 512 + 700]
    bucket.upload_file(str(make_shard(local / "1.tar", "d")), "train/1.tar")
    with pytest.raises(ValueError, match=r"1\.tar .* had the ETag"):
        run_index(tmp_path / "run", s="s3://shards/train/*.tar")
    with pytest.raises(FileNotFoundError, match=r"9\.tar is not there"):
        Remote(FAST).stat(["s3://shards/train/9.tar"])
    with pytest.raises(FileNotFoundError, match="match no file"):
        run_index(tmp_path / "other", s="s3://shards/nothing/*.tar")
