"""Tables of kernel sizes: which entry holds, which table wins, what is refused, and that kernels take the choice."""

import dataclasses
import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from support import chips

from specjax.costmodel.tables import ForeignTableError
from specjax.pallas_kernels import traffic, tuning
from specjax.pallas_kernels import tuning_tables as tables
from specjax.pallas_kernels.decode_step.cut import Cut
from specjax.pallas_kernels.decode_step.weights import Plan
from specjax.pallas_kernels.tree_attention import triton
from specjax.pallas_kernels.tree_attention.tiles import MosaicTiles, Sizes, TritonTiles
from specjax.pallas_kernels.tuning import choose
from specjax.pallas_kernels.tuning_tables import Entry, Provenance, Table

SIZES = Sizes(2, 7, 8, 2, 64, 7, 16, 32, jnp.dtype("bfloat16"))
RULE = TritonTiles.rule(SIZES)
OTHER = dataclasses.replace(RULE, block=32, splits=3, warps=2)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The user's folder and the package's, both empty; every line is said anew."""
    monkeypatch.setattr(tables, "own_path", lambda device, op: tmp_path / "own" / device / f"{op}.json")
    monkeypatch.setattr(tables, "shipped_path", lambda device, op: tmp_path / "shipped" / device / f"{op}.json")
    tuning._missed.cache_clear()
    tuning._note.cache_clear()
    return tmp_path


def entry(tiles, where=None, kernel="triton", **more) -> Entry:
    return Entry(kernel, SIZES.key() if where is None else where, dataclasses.asdict(tiles), "compiled", **more)


def write(root, *entries, device="h100", op="tree_attention", **about):
    path = root / device / f"{op}.json"
    Table(Provenance(device=device, op=op, **about), entries).write(path)
    return path


def chosen(kind=TritonTiles, sizes=SIZES, device=chips.H100):
    with chips.around(device):
        return choose(kind, sizes)


def test_a_measured_table_wins_over_the_shipped_one_and_that_over_the_rule(folders, caplog):
    assert chosen() == chosen() == RULE
    assert [r.message for r in caplog.records] == [
        "tree_attention/triton: no measured sizes for a shape on h100, chosen by rule (`specjax calibrate --kernels` "
        "measures them)"
    ]
    write(folders / "shipped", entry(dataclasses.replace(RULE, warps=2)))
    assert chosen().warps == 2
    write(folders / "own", entry(OTHER))
    assert chosen() == OTHER
    assert chosen(device="NVIDIA B200") == RULE
    assert choose(TritonTiles, SIZES) == RULE  # a CPU has no table


def test_sizes_fall_into_buckets_and_the_entry_that_says_most_holds(folders):
    wide, narrow = (dataclasses.replace(RULE, splits=n) for n in (5, 6))
    general = {"dtype": "bfloat16", "dim": 64}
    write(folders / "own", entry(wide, general), entry(narrow), entry(OTHER, kernel="mosaic_gpu"))
    assert chosen() == narrow
    assert chosen(sizes=dataclasses.replace(SIZES, width=8, columns=30, batch=1)) == wide  # other requests
    assert chosen(sizes=dataclasses.replace(SIZES, width=8, columns=30)) == narrow  # the same buckets
    assert chosen(sizes=dataclasses.replace(SIZES, page=512, columns=1)) == wide  # a dense cache
    assert chosen(sizes=dataclasses.replace(SIZES, dtype=jnp.dtype("float16"))).splits not in (5, 6)


def test_foreign_and_broken_tables_are_passed_over_with_what_differs(folders, caplog):
    foreign = write(folders / "own", entry(OTHER), jax="0.1", code="12345678")
    write(folders / "shipped", entry(dataclasses.replace(RULE, warps=2)))
    assert chosen().warps == 2
    assert f"{foreign} was passed over" in caplog.text
    assert f"jax: the table has '0.1', this is '{jax.__version__}'" in caplog.text
    assert f"code: the table has '12345678', this is '{tables.digest('tree_attention')}'" in caplog.text
    with pytest.raises(ForeignTableError, match="device: the table has 'h100', this is 'b200'"):
        Table.read(foreign).require(tables.provenance("b200", "tree_attention"))
    for text, said in (("{", "Expecting property name"), ('{"format": 7}', "format 7, this reads 1")):
        foreign.write_text(text)
        assert chosen().warps == 2
        assert said in caplog.text


@pytest.mark.parametrize(
    ("tiles", "said"),
    [
        ({"block": 32}, "which are whole numbers"),
        (dataclasses.asdict(OTHER) | {"block": 48}, "block of 48, of powers of two"),
        (dataclasses.asdict(OTHER) | {"splits": True}, "which are whole numbers"),
        (dataclasses.asdict(OTHER) | {"queries": 128}, "128 rows of a program, of which there are 28"),
    ],
)
def test_an_entry_that_a_call_cannot_have_is_passed_over(folders, caplog, tiles, said):
    made = dataclasses.replace(entry(OTHER), tiles=tiles)
    write(folders / "own", made)
    assert chosen() == RULE
    assert said in caplog.text


def test_entries_say_what_they_are():
    with pytest.raises(ValueError, match="not 'guessed'"):
        dataclasses.replace(entry(OTHER), source="guessed")
    with pytest.raises(ValueError, match="have a time"):
        dataclasses.replace(entry(OTHER), source="measured")


def test_a_table_is_read_as_it_was_written_and_updated_in_place(folders):
    first = Table(tables.provenance("h100", "tree_attention"), (entry(RULE), entry(OTHER, {"dim": 80})))
    more = first.updated([dataclasses.replace(entry(OTHER), source="measured", us=3.5, rule_us=4.0)])
    assert [e.us for e in more.entries] == [3.5, None]
    more.write(folders / "t.json")
    assert Table.read(folders / "t.json") == more
    assert json.loads((folders / "t.json").read_text())["entries"][0]["rule_us"] == 4.0
    assert [path.name for path in folders.iterdir()] == ["t.json"]


def test_a_kernel_takes_what_the_table_says(folders):
    """Traced for a device that is not here: its grid and options are the table's."""
    shape = jax.ShapeDtypeStruct
    q, k = (shape((2, 7, heads, 64), jnp.bfloat16) for heads in (8, 2))
    pages, ints = shape((64, 2, 16, 64), jnp.bfloat16), shape((2,), jnp.int32)
    args = q, k, k, shape((2, 7, 7), bool), pages, pages, shape((2, 32), jnp.int32), ints, shape((2, 7), jnp.int32)

    def call():
        with chips.around(chips.H100):
            (found,) = traffic.kernels(functools.partial(triton.attend, scale=1.0), *args)
        return found.params["grid_mapping"].grid, found.params["compiler_params"]

    (_, splits, _), options = call()
    assert (splits, options.num_warps, options.num_stages) == (2 * RULE.splits, RULE.warps, None)
    write(folders / "own", entry(dataclasses.replace(OTHER, stages=4)))
    (_, splits, _), options = call()
    assert (splits, options.num_warps, options.num_stages) == (2 * 3, 2, 4)


def test_weights_are_cut_as_the_table_says_on_a_tpu_alone(folders):
    sizes = {"layers": 2, "hidden": 512, "intermediate": 1024, "heads": 4, "groups": 2, "dim": 128, "eps": 1e-5}
    make = functools.partial(Plan.of, dtype="bfloat16", qk_norm=False, **sizes)
    rule = make()
    written = entry(Cut(128, 256), rule.sizes.key(), kernel="cut")
    for device in ("tpu-v6e", "h100"):
        write(folders / "shipped", written, device=device, op="decode_step")
    with chips.around(chips.V6E, "tpu"):
        plan = make()
    assert (plan.rows, plan.columns) == (128, 256) != (rule.rows, rule.columns)
    with chips.around(chips.H100):
        assert make() == make.func(*make.args, **make.keywords) == rule


def test_what_is_chosen_is_recorded(folders):
    with tuning.recording() as found:
        choose(TritonTiles, SIZES)
        chosen(MosaicTiles, dataclasses.replace(SIZES, capability=90))
        choose(TritonTiles, SIZES)
    choose(TritonTiles, dataclasses.replace(SIZES, batch=9))
    assert [(kind.kernel, sizes.batch) for kind, sizes in found] == [
        ("tree_attention/triton", 2),
        ("tree_attention/mosaic_gpu", 2),
    ]


def test_a_device_without_known_facts_goes_by_its_own_name():
    with chips.around("NVIDIA GeForce RTX 4090"):
        assert tuning.device() == "nvidia-geforce-rtx-4090"
    with chips.around(chips.V6E, "tpu"):
        assert tuning.device() == "tpu-v6e"
    assert tuning.device() is None


def test_shipped_tables_are_whole_and_their_entries_allowed():
    """Whatever the package ships: read, of the device and the op that its place says, and nothing that is made up."""
    root = tables.shipped_path("x", "y").parents[1]
    assert (root / "README.md").is_file()
    for path in root.glob("*/*.json"):
        found = Table.read(path).provenance
        assert (found.device, found.op) == (path.parent.name, path.stem)


def test_nothing_looks_at_a_device_on_import():
    code = (
        "import specjax.pallas_kernels.tree_attention.tpu, specjax.pallas_kernels.decode_step.triton\n"
        "from jax._src import xla_bridge\nassert not xla_bridge._backends"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
