"""`specjax bench` and `specjax demo`: the figures, checked against an engine whose speeds are known."""

import json
from dataclasses import asdict

import jax.numpy as jnp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import heads, toy

from specjax.cli import bench, report
from specjax.cli.main import main
from specjax.cli.report import Sample
from specjax.drafters import candidates, learned
from specjax.drafters.candidates import CandidateReport
from specjax.drafters.hybrid import Hybrid
from specjax.drafters.ngram import NGram
from specjax.engine.request import SpecStats


@pytest.fixture
def prompt_set(tmp_path):
    path = tmp_path / "set.jsonl"
    records = [
        {"category": "short", "turns": ["say hello"]},  # 5 tokens, 4 after the first
        {"category": "long", "turns": ["say hippopotamus", "say hi"]},  # 12 and 2
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def run(prompt_set, *argv) -> tuple[int, dict]:
    out = prompt_set.with_name("out.json")
    code = main(["bench", "--prompts", str(prompt_set), "--json", str(out), *argv])
    return code, json.loads(out.read_text())


def test_figures(prompt_set, engines, capsys):
    code, found = run(prompt_set, "--repeats", "2")
    assert code == 0
    assert found["machine"]["dtype"] == "float32"
    assert {"cpu", "cores", "jax", "jaxlib", "device"} <= found["machine"].keys()
    plain, ngram, suffix = found["drafters"]
    assert [d["drafter"] for d in found["drafters"]] == ["none", "ngram", "suffix"]
    # Plain: one round a token, 4 + 11 + 1 of them; the fake takes 10 ms a round.
    assert (plain["acceptance_length"], plain["per_position"]) == (1.0, [])
    assert plain["tokens_per_s"] == pytest.approx(100)
    assert plain["ratio_to_plain"] == pytest.approx(1)
    # n-gram: two tokens a round, so 2, 6 (the last one short) and 1 rounds.
    assert ngram["acceptance_length"] == pytest.approx(16 / 9)
    assert ngram["per_position"] == pytest.approx([7 / 9])
    assert ngram["tokens_per_s"] == pytest.approx(16 / 0.09)
    assert ngram["ratio_to_plain"] == pytest.approx(16 / 9)
    assert ngram["ratio_to_plain_range"] == pytest.approx([16 / 9, 16 / 9])
    assert ngram["by_category"]["short"]["ratio_to_plain"] == pytest.approx(2)
    assert list(suffix["by_category"]) == ["short", "long"]
    assert {"acceptance_length", "per_position", "tokens_per_s", "ratio_to_plain"} <= suffix["by_category"][
        "long"
    ].keys()
    # A plain round reads 4 MB of weights and the cache so far in 10 ms, and multiplies a million parameters.
    assert plain["by_category"]["short"]["read_gb_s"] == pytest.approx((4e6 + 100 * (3 + 2.5)) / 0.01 / 1e9)
    assert plain["gflop_s"] == pytest.approx(2 * 1e6 / 0.01 / 1e9)
    assert plain["different_answers"] == suffix["different_answers"] == 0
    out = capsys.readouterr().out
    assert "acceptance length" in out
    assert "as plain's" in out


def test_requests_that_run_together_are_compared_by_their_rounds(prompt_set, engines, capsys):
    """And with what came before them: here the time that this test's own engine takes, about none."""
    _, found = run(prompt_set, "--repeats", "2", "--batch", "2")
    plain, ngram, _ = found["drafters"]
    assert plain["read_gb_s"] is None
    assert plain["tokens_per_s"] == pytest.approx(100)
    assert ngram["ratio_to_plain"] == pytest.approx(16 / 9)
    assert ngram["ratio_with_prefill"] > 0
    assert ngram["rows_busy"] == pytest.approx(0.5)  # the fake runs one request after the other
    assert ngram["steady"] is None  # two conversations of two rows
    assert "with prefill" in capsys.readouterr().out


def test_under_a_steady_load_rounds_count_while_every_row_has_a_request(tmp_path, engines, capsys):
    """The last request, whose rows beside it are empty, is the fastest here, and left out."""
    path = tmp_path / "set.jsonl"
    path.write_text("\n".join(json.dumps({"turns": [f"say {word}"]}) for word in ("no", "no", "no", "hippopotamus")))
    _, found = run(path, "--repeats", "1", "--batch", "2", "--drafters", "none,ngram")
    _, ngram = found["drafters"]
    assert ngram["tokens_per_s"] == pytest.approx(100)  # three answers of a round each for a token; 100 for plain, too
    assert ngram["ratio_to_plain"] == pytest.approx(1)
    assert ngram["steady"] == pytest.approx(3 / 9)
    assert "33%" in capsys.readouterr().out
    _, found = run(path, "--repeats", "1", "--batch", "4", "--drafters", "none,ngram", "--times", "2")
    _, ngram = found["drafters"]
    assert found["settings"]["times"] == 2 and ngram["answers"] == 8
    assert ngram["tokens_per_s"] == pytest.approx((6 + 11) / (6 + 6) * 100)
    _, found = run(path, "--repeats", "1", "--batch", "4", "--drafters", "none,ngram")
    _, ngram = found["drafters"]
    assert ngram["steady"] is None and ngram["tokens_per_s"] == pytest.approx((3 + 11) / (3 + 6) * 100)


def test_prefill_counts_where_it_is_asked_for():
    spec = SpecStats()
    spec.rounds = 3
    samples = {
        "none": [{"chat": Sample(1.0, 30, 2.0, [spec], [list(range(31))], None)}],
        "eagle3": [{"chat": Sample(0.5, 30, 2.0, [spec], [list(range(31))], None)}],
    }
    about = {"weights_bytes": 4.0, "dtype": "float32"}
    _, found = report.summarise({}, {}, about, samples)["drafters"]
    assert found["ratio_to_plain"] == pytest.approx(2.0)
    assert found["ratio_with_prefill"] == pytest.approx(1.0)
    assert found["rows_busy"] == 1.0


def test_the_planner_is_compared_with_the_best_of_the_others(prompt_set, engines, capsys):
    """The fake set accepts nothing; suffix, with three drafts a round, is the best where answers are long."""
    _, found = run(prompt_set, "--drafters", "none,ngram,suffix,auto", "--repeats", "3")
    plain, _, suffix, auto = found["drafters"]
    assert plain["against_best_fixed"] is None
    long = auto["against_best_fixed"]["long"]
    assert long["best"] == "suffix"
    assert long["ratio"] == pytest.approx(1 / suffix["by_category"]["long"]["ratio_to_plain"])
    assert long["ratio_interval"] == pytest.approx([long["ratio"]] * 2)
    out = capsys.readouterr().out
    assert "best fixed, in hindsight" in out
    assert out.count("cost of planning: host 0.80%") == 2  # beside the intervals, and where the planner explains itself


def test_limit_takes_the_first_of_each_category(prompt_set, engines):
    more = prompt_set.read_text() + "\n" + json.dumps({"category": "short", "turns": ["say nothing"]})
    prompt_set.write_text(more)
    _, found = run(prompt_set, "--limit", "1", "--repeats", "1", "--drafters", "none")
    assert found["settings"]["conversations"] == 2
    assert not any("nothing" in str(prompt) for prompt in engines.made[0].asked)


def test_categories_take_turns_in_being_the_first(prompt_set, engines, capsys):
    _, found = run(prompt_set, "--repeats", "3", "--drafters", "none")
    begun = [line.split(", ")[1] for line in capsys.readouterr().err.splitlines() if "none, " in line]
    assert begun == ["short", "long", "long", "short", "short", "long"]
    assert list(found["drafters"][0]["by_category"]) == ["short", "long"]


def test_seeds_are_each_conversations_own_and_the_same_for_all_engines(prompt_set, engines):
    run(prompt_set, "--temperature", "0.8", "--repeats", "2", "--drafters", "none,ngram")
    plain, ngram = ([p.seed for params in e.params_given[1:] for p in params] for e in engines.every)
    assert plain[:3] == [1, 2, 2]  # a request of line 1, two turns of line 2
    assert sorted(plain) == sorted(ngram)
    assert len(set(plain)) == 4
    run(prompt_set, "--repeats", "1", "--drafters", "none")
    assert {p.seed for params in engines.every[-1].params_given[1:] for p in params} == {None}


def test_a_conversation_that_comes_again_has_another_seed_each_time(prompt_set, engines):
    run(prompt_set, "--temperature", "0.8", "--repeats", "2", "--drafters", "none", "--times", "3")
    seeds = [p.seed for params in engines.made[0].params_given[1:] for p in params]
    first = seeds[:3]
    assert len(first) == len(set(first)) == 3
    assert len(set(seeds)) == 2 * 3 * 2  # two repeats of three times, two lines; the turns of a line share its seed


def test_figures_are_written_after_each_repeat(prompt_set, engines, monkeypatch):
    out, seen = prompt_set.with_name("out.json"), []
    write = report.write_json
    monkeypatch.setattr(report, "write_json", lambda found, path: (seen.append(found), write(found, path)))
    run(prompt_set, "--repeats", "2", "--drafters", "none")
    assert [found["settings"]["repeats"] for found in seen[:2]] == [1, 2]
    assert json.loads(out.read_text()) == json.loads(json.dumps(seen[-1]))


def test_steps_are_lines_where_there_is_no_terminal(prompt_set, engines, capsys):
    run(prompt_set, "--repeats", "1", "--drafters", "none")
    assert [line for line in capsys.readouterr().err.splitlines() if "none, " in line] == [
        "1/2 none, short",
        "2/2 none, long",
    ]


def test_answers_count_alike_and_those_that_loop_apart(prompt_set, engines, capsys):
    _, found = run(prompt_set, "--repeats", "3")
    plain, ngram, _ = found["drafters"]
    assert plain["of_answers"]["mean"] == pytest.approx(1.0)
    # 4 tokens in 2 rounds, 11 in 6, 1 in 1, three times over; none of them loops.
    assert ngram["of_answers"]["mean"] == pytest.approx((4 / 2 + 11 / 6 + 1) / 3)
    assert (ngram["of_answers"]["looping"], ngram["of_answers"]["not_looping"]) == (0, 9)
    assert ngram["of_answers"]["mean_looping"] is None
    # The fake's speeds do not waver.
    assert ngram["ratio_to_plain_interval"] == pytest.approx([16 / 9, 16 / 9])
    assert "of those that loop" in capsys.readouterr().out


def test_a_looping_answer_is_told_from_others():
    spec = SpecStats()
    spec.rounds, spec.accepted = 4, 8
    sample = Sample(1.0, 2, 1.5, [spec, spec], [[1, 2, 3] * 20, list(range(60))], None)
    found = report._of_answers([sample])
    assert (found["looping"], found["not_looping"]) == (1, 1)
    assert found["mean_looping"] == found["mean_not_looping"] == spec.acceptance_length


def test_the_interval_is_students():
    low, high = report._interval([1.0, 2.0, 3.0])
    assert (low, high) == (pytest.approx(2 - 4.3027 / 3**0.5, abs=1e-3), pytest.approx(2 + 4.3027 / 3**0.5, abs=1e-3))
    assert report._interval([1.0, 2.0]) is None


def test_all_means_what_comes_with_the_target(prompt_set, engines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for family in ("mtp", "eagle3"):
        folder = tmp_path / "drafts" / "smollm2-135m" / family
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    _, found = run(prompt_set, "--drafters", "all", "--repeats", "1")
    names = [d["drafter"] for d in found["drafters"]]
    assert names == ["none", "ngram", "suffix", "eagle3", "mtp", "hybrid", "auto"]
    sections = engines.made[0].drafters
    assert [one.kind for one in sections[-1].of] == ["ngram", "hybrid"]


def test_a_drafter_from_a_file(prompt_set, engines, tmp_path):
    (tmp_path / "short.yaml").write_text("drafter: {kind: ngram, num_speculative_tokens: 2}")
    _, found = run(prompt_set, "--drafters", f"ngram,{tmp_path}/short.yaml", "--repeats", "1")
    assert [d["drafter"] for d in found["drafters"]] == ["none", "ngram", "short"]
    assert [d.num_speculative_tokens for d in engines.made[0].drafters] == [5, 2]


def test_no_probe(prompt_set, engines, capsys):
    code, _ = run(prompt_set, "--drafters", "ngram,./head,mtp", "--no-probe", "--repeats", "1")
    assert code == 0
    assert [getattr(drafter, "probe", None) for drafter in engines.made[0].drafters] == [None, False, False]
    assert main(["bench", "--prompts", str(prompt_set), "--drafters", "ngram,suffix", "--no-probe"]) == 2
    assert "--no-probe is for learned drafters, whose files declare a wiring; not for: ngram" in capsys.readouterr().err


HEAD = CandidateReport(
    rank=8, candidates=32, columns=500, positions=90, recall={1: 0.97, 4: 0.9}, rows=4, candidate_ms=0.1, full_ms=0.4
)


def test_candidate_heads_are_reported(prompt_set, engines, capsys, monkeypatch):
    """Along the plain answers to the first prompt of each category; nothing for drafters without such a head."""
    texts = []

    def report(drafter, params, target, target_params, given, *, batch):
        texts.append(given)
        return None if len(texts) == 1 else HEAD

    monkeypatch.setattr(candidates, "report", report)
    _, found = run(prompt_set, "--drafters", "none,ngram", "--repeats", "1")
    assert texts[1] == [[ord(letter) for letter in text] for text in ("say hellohello", "say hippopotamushippopotamus")]
    assert [drafter["candidate_head"] for drafter in found["drafters"]] == [None, json.loads(json.dumps(asdict(HEAD)))]
    out = " ".join(capsys.readouterr().out.split())
    assert "ngram: candidate head of rank 8, 32 of 500 tokens: 0.10 ms against 0.40 ms of the full head for 4" in out
    assert "recall 0.970 of the best 1, 0.900 of the best 4 over 90 positions" in out


def test_the_candidate_head_of_a_hybrid():
    """Is that of its model."""
    config = heads.head_config("mtp", own_head=True, head_rank=32, head_candidates=4)
    model, params = learned.build(config, heads.random_tensors(config), *toy.tiny(), jnp.float32)
    drafter = Hybrid(model=model, lookup=NGram())
    engine = toy.engine(drafter, {"model": params, "lookup": ()})
    assert bench._candidate_head(engine, [[1, 2, 3]])["columns"] == toy.VOCAB


def test_engines_forget_before_each_repeat_and_warm_up_is_not_counted(prompt_set, engines):
    run(prompt_set, "--repeats", "3", "--drafters", "none")
    engine = engines.made[0]
    assert engine.forgot == 3
    warm_up = 1
    assert len(engine.asked) == warm_up + 3 * 3  # a call a turn and category


def test_plain_is_added(prompt_set, engines, capsys):
    _, found = run(prompt_set, "--drafters", "ngram", "--repeats", "1")
    assert [d["drafter"] for d in found["drafters"]] == ["none", "ngram"]
    assert "added 'none'" in capsys.readouterr().err


def test_options_of_the_configuration(prompt_set, engines):
    run(prompt_set, "--repeats", "1", "-o", "drafter=suffix", "-o", "drafter.num_speculative_tokens=9")
    ngram, suffix = engines.made[0].drafters
    assert (ngram.num_speculative_tokens, suffix.num_speculative_tokens) == (5, 9)


def test_different_tokens_are_reported(prompt_set, engines, capsys):
    engines.offset = 1
    code, found = run(prompt_set, "--repeats", "1")
    assert code == 1
    assert [d["different_answers"] for d in found["drafters"]] == [0, 3, 3]
    assert "3 of 3 answers differ" in capsys.readouterr().out


def test_plot(prompt_set, engines):
    path = prompt_set.with_name("out.png")
    main(["bench", "--prompts", str(prompt_set), "--repeats", "1", "--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in path.parent.iterdir()} == {"set.jsonl", "out.png"}


def test_metrics_are_of_the_last_repeat_by_drafter(prompt_set, engines, tmp_path):
    path = tmp_path / "out.prom"
    run(prompt_set, "--drafters", "none,suffix", "--repeats", "3", "--metrics", str(path))
    families = {family.name: family for family in text_string_to_metric_families(path.read_text())}

    def values(name):
        return {sample.labels["engine"]: sample.value for sample in families[name].samples}

    tokens = len("hello") + len("hippopotamus") + len("hi")
    assert values("specjax_generated_tokens") == {"none": tokens, "suffix": tokens}
    # Runs of three accepted drafts and a token, the last run shorter.
    assert values("specjax_request_rounds") == {"none": tokens - 3, "suffix": 1 + 3 + 1}
    assert values("specjax_accepted_tokens") == {"none": 0, "suffix": tokens - 3 - 5}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--times", "0"], "--times must be at least 1"),
        (["--times", "2"], "--times asks for answers again, which suffix would remember"),
        (
            ["--times", "2", "--drafters", "auto", "--set", "drafter.kind=auto", "--set", "drafter.of=[suffix]"],
            "auto would",
        ),
        (["--json", "nowhere/out.json"], "its folder does not exist"),
        (["--plot", "out.xyz"], "names no kind of picture"),
        (["--metrics", "nowhere/out.prom"], "its folder does not exist"),
        (["--drafters", "ngram,ngram"], "names one twice"),
        (["--drafters", "ngrm"], "did you mean 'ngram'"),
        (["--drafters", "nowhere.yaml"], "cannot read nowhere.yaml"),
    ],
)
def test_refused_before_anything_loads(argv, words, prompt_set, engines, capsys):
    assert main(["bench", "--prompts", str(prompt_set), *argv]) == 2
    assert words in capsys.readouterr().err
    assert not engines.made


def test_demo(engines, capsys):
    assert main(["demo", "--prompt", "say hippopotamus"]) == 0
    out = capsys.readouterr().out
    assert out.count("hippopotamus") == 3  # the prompt and both answers
    assert "1.83 times plain" in out
    assert "same tokens        yes" in out


def test_demo_fails_on_different_tokens(engines, capsys):
    engines.offset = 1
    assert main(["demo"]) == 1
    assert "same tokens        NO" in capsys.readouterr().out


def test_demo_needs_a_drafter(engines, capsys):
    assert main(["demo", "--drafter", "none"]) == 2


def test_two_outputs_need_two_files(engines, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--prompts", "configs/prompts/demo.jsonl", "--json", "out", "--metrics", "./out"]) == 2
    assert "out cannot hold two outputs" in capsys.readouterr().err
    assert not engines.made and not list(tmp_path.iterdir())
