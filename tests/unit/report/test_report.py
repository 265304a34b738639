"""The page of a made-up run: what it says, how it shows strangers' text, what it leaves out."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from mclclip import api, config
from mclclip.eval import results
from mclclip.eval.outcomes import Outcomes
from mclclip.eval.results import Reference, Result
from mclclip.ranks.process_group import SINGLE
from mclclip.report import clusters, duration, pictures, scores, story
from mclclip.report.pictures import Thumbnails, one_of_each
from mclclip.run.artifacts import read_manifest
from mclclip.run.opened import Run
from mclclip.verbs import index, report
from tests import made_run
from tests.shard_server import serving
from tests.tiny import digests
from tests.unit.run.test_trackers import Calls, put_package

SECTIONS = "story results better pairs clusters groups nearest blindspots filters curves cost words"
VOID = {"meta", "link", "img", "br", "wbr"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up run with its page; read only."""
    run_dir = made_run.make(tmp_path_factory.mktemp("made"))
    report.run(str(run_dir))
    return run_dir


@pytest.fixture(scope="module")
def page(made: Path) -> str:
    return (made / report.NAME).read_text(encoding="utf-8")


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy that a test may damage; its data are the original's."""
    yield Path(shutil.copytree(made, tmp_path / "run"))


def text_of(page: str, section: str | None = None) -> str:
    """The words of a page, or of one of its sections, with one blank between."""
    if section is not None:
        page = page.partition(f'<section id="{section}">')[2].partition("</section>")[0]
    return " ".join(re.sub(r"<[^>]*>", " ", page.replace("<wbr>", "")).split())


def page_of(run_dir: Path) -> str:
    return report.run(str(run_dir)).read_text(encoding="utf-8")


def without_pictures(run_dir: Path) -> Path:
    """Removes the index of a run, so that its page is made in less time."""
    shutil.rmtree(run_dir / "index")
    return run_dir


def words_of_run(run_dir: Path, section: str | None = None) -> str:
    return text_of(page_of(run_dir), section)


class Reader(HTMLParser):
    """Reads a page as a browser does, and refuses tags that do not close each other."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> at {self.getpos()}"


def test_it_is_whole_html_that_asks_for_nothing(page: str) -> None:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    assert all(re.match(r"data:|#", address) for address in reader.addresses)
    assert not reader.tags & {"script", "iframe", "object", "form", "base"}
    assert not re.search(r"https?:|url\(|@import", page)
    assert "default-src 'none'" in page
    anchors = set(re.findall(r'href="#(\w+)"', page))
    assert anchors == set(re.findall(r'<section id="(\w+)"', page)) == set(SECTIONS.split())


def test_a_run_that_has_all_lacks_nothing(page: str) -> None:
    assert "Left out" not in page and "left out" not in page
    assert len(page) < 500_000  # though every caption has 20,000 characters
    assert "x" * 300 in page and "x" * 500 not in page


def test_what_strangers_wrote_is_shown_escaped(page: str) -> None:
    """Captions, statements, Types and a model's name hold a script and control characters."""
    assert made_run.SCRIPT not in page and "<script" not in page
    assert page.count("&lt;script&gt;") > 20
    assert all(c.isprintable() or c == "\n" for c in page)
    for section in ("results", "pairs", "nearest"):
        assert "&lt;script&gt;" in text_of(page, section)


def test_the_same_run_gives_the_same_bytes_and_is_not_changed(made: Path, page: str) -> None:
    before = digests(made, "**/*")
    assert report.run(str(made)).read_text(encoding="utf-8") == page
    assert digests(made, "**/*") == before


def test_the_story_says_what_was_done(page: str) -> None:
    words = text_of(page, "story")
    assert (
        "Its embeddings of 48 samples were clustered into 2 clusters (spherical k-means)" in words
    )
    assert "2 samples could not be used." in words
    assert "Words that tell their captions apart: azure, scarlet." in words
    assert "It started again from the base&#39;s weights and was trained by info_nce" in words
    assert "30 steps of 8 samples" in words and "loss went from 0.500 to 0.167" in words
    assert "“ungrouped” repeated" in words


def test_the_clusters_show_their_words_and_members(page: str) -> None:
    words = text_of(page, "clusters")
    stage_0 = words.partition("Stage 0")[2].partition("Stage 1")[0]
    azure, scarlet = re.findall(r"Cluster \d ([\d.]+) % of samples (\w+) 100 % / 0 %", stage_0)
    assert azure[1] == "azure" and scarlet[1] == "scarlet"
    assert float(azure[0]) == pytest.approx(100 * 30 / 46, abs=0.05)  # 16 of 46 are red
    assert page.count("data:image/") > 40


def test_blind_spots_are_shown_and_what_was_moved_aside_is_not(copied: Path, page: str) -> None:
    """Stage 0 parts red from blue, and stage 1 the halves of the data: 46 samples, 16 of them red.
    Pairs of one colour and of different halves are confused and told apart."""
    words = text_of(page, "blindspots")
    in_halves = [
        [made_run.is_red(n) for n in half if n not in made_run.BROKEN]
        for half in (range(24), range(24, 48))
    ]
    red = [sum(half) for half in in_halves]
    blue = [len(half) - sum(half) for half in in_halves]
    apart = red[0] * red[1] + blue[0] * blue[1]
    same = sum(n * (n - 1) // 2 for n in (*red, *blue))
    assert "stage_0 confuses, stage_1 tells apart" in words
    assert f"Of {apart + same} pairs whose cosine is above 0.95 for stage_0" in words
    assert f"{apart} are below 0.6 for stage_1, and {same} are above 0.95 for it too" in words
    section = page.partition('<section id="blindspots">')[2].partition("</section>")[0]
    assert section.count("<figure>") == 8 and section.count("data:image/") == 16
    spots = copied / "blindspots"
    shutil.copytree(spots / "stage_0-stage_1", spots / "stage_0-stage_1.old-1")
    run = Run.open(copied)
    assert len(pictures.blindspots(run, Thumbnails(run))) == 1


def test_filters_are_shown_and_what_was_moved_aside_is_not(copied: Path, page: str) -> None:
    words, folder = text_of(page, "filters"), copied / "filters"
    kept = int(np.load(folder / "few/weights.npy").sum())
    assert 0 < kept < 46
    flags = "--near-duplicates 0.999 --within clusters --stage 0"
    reasons = f"no_embedding 2, near_duplicate {46 - kept}"
    assert f"few {flags} 48 {kept} {reasons}" in words
    shutil.copytree(folder / "few", folder / "few.old-1")
    assert len(pictures.filters(Run.open(copied))) == 1
    manifest = folder / "few/manifest.json"
    manifest.write_text(manifest.read_text().replace('"reasons"', '"others"'))
    with pytest.raises(RuntimeError, match="few/manifest.json is damaged"):
        pictures.filters(Run.open(copied))


def test_figures_verdicts_pairs_and_costs(page: str) -> None:
    assert "8 pairs" in text_of(page, "results")
    better = text_of(page, "better")
    assert "concat_stage_norm has 87.5, stage_0 12.5, which is +75.0 points" in better
    assert "+5 of 8 pairs" in better  # against the control: 7 and 2 right
    pairs = text_of(page, "pairs")
    assert "colour +3 -1 of 4" in pairs and "+4 -0 of 4" in pairs
    cost = text_of(page, "cost")
    assert "stage_1 30 240 60 s 2 1.50 GiB 0.03" in cost
    assert "all 90 720 4 min" in cost and "0.13" in cost  # 240 s on two ranks
    assert "Pictures that are not shown: 1 (unidentified)." in text_of(page)


def test_agreement_is_what_cluster_recorded(made: Path, page: str) -> None:
    words = text_of(page, "groups")
    assert (
        "of all samples, as &#39;mclclip cluster&#39; recorded it. Of attributes: computed of 48"
        in words
    )
    recorded = read_manifest(made / "stage_1" / "clusters", "clusters").counts["ami"]["stage_0"]
    assert f"stage_0 1.00 {recorded:.2f} 1.00" in words  # and red is what stage 0 clustered by
    assert f"stage_1 {recorded:.2f} 1.00" in words


# --- runs that lack something --------------------------------------------------------------------


def test_verdict_and_page_are_logged_to_the_trackers(
    copied: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = Calls()
    put_package(monkeypatch, "wandb", calls)
    path = without_pictures(copied) / "config.yaml"
    options = config.load(path, [f"run_dir={copied}", "track=[wandb]"])
    names = ("verdict.md", report.NAME)
    report.track(options)
    assert [args for name, args in calls if name == "add_file"] == [
        (str(copied / name),) for name in names
    ]
    sentences = api.Run.open(copied).verdict()
    text = (copied / "verdict.md").read_text()
    assert text.startswith("\n\n".join(sentences)) and "| benchmark" in text
    shutil.rmtree(copied / "outcomes")
    calls.clear()
    report.track(options)
    assert [args for name, args in calls if name == "add_file"] == [(str(copied / names[1]),)]
    assert "verdict.md is left out" in caplog.text


def test_a_run_with_nothing_to_compare_has_a_verdict_too(copied: Path) -> None:
    path = without_pictures(copied) / "config.yaml"
    results = copied / "results.jsonl"
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(line for line in lines if json.loads(line)["model"] == "stage_0"))
    report.track(config.load(path, [f"run_dir={copied}"]))
    verdict = api.Run.open(copied).verdict()
    assert (copied / "verdict.md").read_text() == "\n\n".join(verdict) + "\n"


def test_there_is_no_run_or_nothing_to_show(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no run at"):
        report.run(str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="there is no run at .*config.yaml"):
        report.run(str(tmp_path))
    (tmp_path / "config.yaml").write_text("run_dir: a\ndata: {sources: {b: {shards: c}}}\n")
    with pytest.raises(FileNotFoundError, match="nothing to show yet"):
        report.run(str(tmp_path))
    with pytest.raises(ValueError, match="wanted a run directory"):
        report.run()


def test_head_and_verdict_of_a_fine_tuning_name_one_encoder(tmp_path: Path) -> None:
    """That which the share to choose by has chosen, on the other share, and not the joined one."""
    shares = {"stage_0": 0.3, "stage_1": 0.5, "concat_stage_norm": 0.6}
    items = [str(number) for number in range(200)]
    for name, share in shares.items():
        for benchmark, right in (("choose", 0.9 if name == "stage_1" else 0.1), ("report", share)):
            own = Outcomes(items, np.arange(200) < 200 * right)
            figure = results.figure("R@1", own, {}, level="headline")
            results.record(tmp_path / "results.jsonl", [figure], name, benchmark)
    opened = api.Run.open(tmp_path)
    page = report.run(str(tmp_path)).read_text(encoding="utf-8")
    head, lines = text_of(page.partition("<nav>")[0]), opened.verdict()
    assert lines[0] in head
    assert opened.recommended() == opened.tuned() == "stage_1" and "stage_1" in lines[0]
    assert re.search(r"report R@1 30.0 -&gt; 50.0 \(\+20.0 points, .*\+[0-9.]+\), better", head)
    assert "concat" not in head


def test_evaluations_alone_have_a_page(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(made / "results.jsonl", tmp_path)
    shutil.copytree(made / "outcomes", tmp_path / "outcomes")
    page = report.run(str(tmp_path), out=tmp_path / "out" / "page.html").read_text()
    assert "+75.0 points" in text_of(page, "better")
    assert "The configuration does not say where the pictures" in text_of(page, "pairs")
    assert 'id="clusters"' not in page and "index" not in caplog.text
    assert 'id="cost"' not in page and "records of a training" in text_of(page)
    assert not (tmp_path / report.NAME).exists()


def test_what_is_gone_is_left_out_with_a_reason(copied: Path) -> None:
    (copied / "stage_0/clusters/manifest.json").unlink()
    run = Run.open(copied)
    assert [each["stage"] for each in clusters.clustered(run, Thumbnails(run))] == [1]
    for gone in ("outcomes", "index", "controls"):
        shutil.rmtree(copied / gone)
    page = page_of(copied)
    for section in ("clusters", "nearest"):
        assert "no finished index" in text_of(page, section)
    assert "no outcomes of items" in text_of(page, "better")
    assert "Stage 1: loss" in text_of(page, "curves")


def test_gain_and_forgetting_are_drawn_in_one_chart(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line per benchmark, from stage 0's figure, of the headline metric in percent alone."""

    def evaluate(path: Path, model: str, right: dict[str, int]) -> None:
        for benchmark, number in right.items():
            outcomes = Outcomes([f"{n}" for n in range(8)], np.arange(8) < number)
            figures = [
                results.figure(name, outcomes, {"name": "knn"}, level=level)
                for name, level in (("accuracy", "headline"), ("other", "table"))
            ]
            results.record(path, figures, model, benchmark)

    evaluate(copied / "results.jsonl", "stage_0", {"known": 6, "task": 2})
    path = copied / "stage_1" / "train" / "evaluations" / "results.jsonl"
    evaluate(path, "step_00000010", {"known": 5, "task": 4, "new": 1})
    evaluate(path, "step_00000020", {"known": 4, "task": 6})
    key = [("stage", "known: accuracy"), ("control", "task: accuracy")]
    words = words_of_run(without_pictures(copied), "curves")
    assert "Stage 1: percentage points from stage 0 known: accuracy task: accuracy" in words
    monkeypatch.setattr(story.charts, "lines", lambda title, x, series: series)
    (stage,) = (one for one in story.curves(Run.open(copied)) if one["evaluated"])
    assert stage["stage"] == 1 and [one["lines"] for one in stage["evaluated"]] == [key]
    assert stage["evaluated"][0]["chart"] == [
        ("stage", [(0.0, 0.0), (10.0, -12.5), (20.0, -25.0)]),
        ("control", [(0.0, 0.0), (10.0, 25.0), (20.0, 50.0)]),
    ]


def test_damaged_files_leave_a_part_of_the_page_out(copied: Path) -> None:
    path = copied / "stage_0" / "clusters" / "cluster_labels.npy"
    path.write_bytes(path.read_bytes()[:-1])
    (copied / "stage_1/train/manifest.json").write_bytes(b"")
    page = page_of(copied)
    assert "stage_1/train/manifest.json" in text_of(page)
    assert "cluster_labels.npy is damaged" in text_of(page, "clusters")
    (copied / "index/manifest.json").write_bytes(b"")
    assert "index/manifest.json" in words_of_run(copied)


def test_pictures_of_shards_that_are_gone_are_counted(made: Path, tmp_path: Path) -> None:
    moved = {made.parent / name: tmp_path / name for name in ("shards", "pairs")}
    for place, away in moved.items():
        place.rename(away)
    page = report.run(str(made), out=tmp_path / "page.html").read_text()
    for place, away in moved.items():
        away.rename(place)
    assert re.search(r"not shown: \d+ \(missing file\)", text_of(page))
    assert "Their pictures are not there any more" in text_of(page, "pairs")
    assert "colour +3 -1 of 4" in text_of(page, "pairs") and "data:image" not in page


def test_a_training_that_runs_is_shown(copied: Path) -> None:
    for name in ("stage_1/train/manifest.json", "results.jsonl"):
        (copied / name).unlink()
    shutil.rmtree(copied / "blindspots")
    page = page_of(without_pictures(copied))
    assert 'id="blindspots"' not in page and "blind spots (" in text_of(page)
    assert not re.search('id="(results|better|words)"', page)
    assert "so far (it is not finished)" in text_of(page, "story")
    assert "not finished" in text_of(page, "cost")


def test_a_wrong_row_of_results_stops_it(copied: Path) -> None:
    (copied / "results.jsonl").write_text('{"model": "stage_0"}\n')
    with pytest.raises(ValueError, match=r"results.jsonl line 1 is not a result row"):
        report.run(str(copied))


# --- large runs ----------------------------------------------------------------------------------


def test_of_many_samples_some_are_read_and_the_page_says_so(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "LABEL_ROWS", 32)
    monkeypatch.setattr(pictures, "FEATURE_ROWS", 16)
    page = page_of(copied)
    assert "32 of 48 samples, spread evenly" in text_of(page, "clusters")
    assert "among 16 of 48 samples" in text_of(page, "nearest")
    made = Run.open(copied)
    for tuned, names in (("stage_1", ["stage_0", "stage_1"]), (None, ["stage_0"])):
        assert [*pictures.anchors(made, Thumbnails(made), tuned)[0]["encoders"]] == names


def test_pictures_stay_within_their_budget(tmp_path: Path) -> None:
    path = tmp_path / "0.jpg"
    path.write_bytes(made_run.picture(True, (80, 80)))
    run = Run(tmp_path)
    size = len(Thumbnails(run).of_image(path, "").uri)
    made = Thumbnails(run, budget_bytes=2 * size + 1)
    # Every use counts, also of the same picture: each stands in the page again.
    shown = [bool(made.of_image(path, "text").uri) for _ in range(4)]
    assert shown == [True, True, False, False] and made.left_bytes == 1
    assert made.lost() == {"beyond the size of the page": 2}
    assert [made.of_image(path, text).text for text in ("a", "b")] == ["a", "b"]
    made = Thumbnails(run)
    made.max_image_pixels = 100
    assert made.of_image(path, "").reason == "bomb"
    assert made.of_image(tmp_path / "none", "").reason == "missing file"


def test_arrays_are_pictures_too(tmp_path: Path) -> None:
    path = tmp_path / "array.npy"
    np.save(path, np.zeros((20, 30, 4), np.uint8))
    found = Thumbnails(Run(tmp_path)).of_image(path, "")
    assert found.small and found.uri.startswith("data:image/png")


# --- parts ---------------------------------------------------------------------------------------


def test_published_figures_stand_in_the_table_of_their_benchmark(made: Path) -> None:
    rows = Run(made).result_rows
    references = [Reference("theirs", "pairs", "average", 45.0, "a paper")]
    references += [Reference("theirs", "pairs", "unknown", 1.0, "a paper")]
    references += [Reference("theirs", "other", "average", 1.0, "a paper")]
    (table,) = scores.tables(rows, references)
    assert [*table["figures"]][-1] == ("theirs", "a paper")
    published = table["figures"]["theirs", "a paper"]
    assert {metric: cell["text"] for metric, cell in published.items()} == {"average": "45.0"}
    assert "theirs" not in table["strips"] and table["headline"] == "average" and table["is_pairs"]


def test_a_loss_is_shown_in_nats() -> None:
    values = {"stage_0": 4.6051, "stage_1": 4.6049, "stage_2": 4.4}
    rows = [
        Result(name, "held_out", "loss", value, 40, value - 0.1, value + 0.1, {"unit": "nats"})
        for name, value in values.items()
    ]
    (table,) = scores.tables(rows, [])
    cells, strips = [figures["loss"] for figures in table["figures"].values()], table["strips"]
    assert [cell["text"] for cell in cells] == ["4.61", "4.60", "4.40"]
    assert cells[2]["interval"] == "4.30-4.50"
    assert table["metrics"]["loss"].endswith("(nats)")
    assert 'aria-label="4.40, from 4.30 to 4.50"' in strips["stage_2"]
    assert 'x1="0.0%"' in strips["stage_2"] and 'x2="100.0%"' in strips["stage_0"]
    assert len(scores.references()) > 10


def test_pairs_of_all_types_come_first() -> None:
    assert one_of_each([0, 1, 2, 5], ["a", "a", "b", "b", "b", "c"]) == [0, 2, 5, 1]


def test_durations_in_words_and_sums_that_lack_a_part() -> None:
    said = [duration(seconds) for seconds in (None, 90.0, 600.0, 11_520.0)]
    assert said == ["not recorded", "90 s", "10 min", "3 h 12 min"]
    assert story.total([60.0, 1.0]) == 61.0
    assert story.total([60.0, None]) is story.total([]) is None


def test_thumbnails_of_samples_carry_their_captions_and_files(made: Path) -> None:
    found = Thumbnails(Run.open(made))
    assert found.of_sample(0).text.startswith("a scarlet thing")
    assert found.of_sample(0).name == f"made/00000 (photos/0{made_run.SCRIPT})"
    for _ in range(2):
        assert found.of_sample(made_run.BROKEN[0]).reason == "truncated"
    assert found.lost() == {"truncated": 1}


def test_pictures_are_read_behind_urls(tmp_path: Path) -> None:
    made_run.write_shards(tmp_path / "shards")
    with serving(tmp_path / "shards") as server:
        tree = asdict(made_run.settings(tmp_path))
        urls = [server.url(path.name) for path in sorted(server.folder.iterdir())]
        tree["data"]["sources"]["made"]["shards"] = urls
        options = config.from_tree(tree)
        index.run(options, SINGLE)
        (tmp_path / "run" / "config.yaml").write_text(config.dump(options))
        shown = Thumbnails(Run.open(tmp_path / "run")).of_sample(0)
    assert shown.uri.startswith("data:image/")
