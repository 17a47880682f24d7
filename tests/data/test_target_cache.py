"""The feature cache: what was written is read, whatever was interrupted; what is damaged or foreign is named."""

import dataclasses
import errno
import json
import os
import socket
import subprocess
import sys
import types
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from configs.base import get_base
from dspark_jax import prepare_features
from dspark_jax.data import cache_writer
from dspark_jax.data.batches import Batches, learnt_length
from dspark_jax.data.cache_writer import CacheWriter, sink_writer, size_line
from dspark_jax.data.target_cache import CacheInfo, CacheRows, TargetCache, decode, encode, open_store
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.errors import UserError
from dspark_jax.interop.target_io import load_target
from dspark_jax.prepare_features import write_features
from dspark_jax.training import loop
from dspark_jax.training.features import CachedFeatures, FeatureSource, open_cache, target_features
from tests.data.buckets import storage_servers

ROOT = Path(__file__).parents[2]
TAPS, MAX_LENGTH = (0, 2), 60


@pytest.fixture(scope="module")
def target(chat_model):
    return load_target(chat_model, tap_layers=TAPS)


@pytest.fixture(scope="module")
def rows():
    """Answers of all lengths: too short to be learnt, longer than `MAX_LENGTH`, and in between."""
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(0, 260, n).tolist()  # noqa: E731
    lengths = [20, 3, 40, 70, 25, 12, 33, 9]
    return [{"id": f"q{i}", "prompt_ids": draw(4 + i), "answer_ids": draw(n)} for i, n in enumerate(lengths)]


def info_of(target, dtype="float32", max_length=MAX_LENGTH):
    return CacheInfo.of(target, TAPS, dtype, max_length)


def write(place, target, rows, dtype="float32", process=0, processes=1, total=None, **options):
    writer = CacheWriter(str(place), info_of(target, dtype), total or len(rows), process, processes, **options)
    with writer:
        mine = [(n, row) for n, row in enumerate(rows) if n % processes == process and row["id"] not in writer.done]
        write_features(target, mine, writer, batch_size=2)
    return len(mine)


@pytest.fixture(scope="module")
def written(tmp_path_factory, target, rows):
    place = tmp_path_factory.mktemp("cache") / "float32"
    write(place, target, rows)
    return place


def copy(place: Path, to: Path) -> Path:
    for file in place.rglob("*"):
        if file.is_file():
            (to / file.relative_to(place)).parent.mkdir(parents=True, exist_ok=True)
            (to / file.relative_to(place)).write_bytes(file.read_bytes())
    return to


def same(ours, theirs, error=1e-5):
    """Equal to `error` of the largest."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        b = np.asarray(b, np.float64)
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=error * np.abs(b).max(initial=0))


def own(target, row, length):
    """The features of one row, computed for it alone."""
    ids = np.asarray(row["prompt_ids"] + row["answer_ids"], np.int32)[:length]
    out = target_features(target.module, target.params, np.pad(ids, (0, 64 - length))[None])
    return CacheRows(*(np.asarray(a[0, :length]) for a in jax.tree.leaves(out)))


# ---------------------------------------------------------------------------------------------------- what is written


def test_a_batch_read_from_the_cache_is_the_batch_computed(written, target, rows):
    cache = TargetCache(str(written), target, TAPS)
    assert cache.rows == rows and not cache.lacks_last_rows
    batches = Batches(cache.rows, 3, MAX_LENGTH, seed=1)
    source, online = CachedFeatures(target, cache), FeatureSource(target, keep=False)
    for step in range(2):
        batch = batches(step)
        kept = np.arange(batch.token_BxS.shape[1]) < batch.length_B[:, None]
        cut = lambda features, kept=kept: jax.tree.map(lambda a: np.asarray(a)[kept], features)  # noqa: E731
        same(cut(source(batch)), cut(online(batch)))


@pytest.mark.parametrize(("dtype", "error"), [("float32", 0), ("bfloat16", 2**-8), ("int8", 0.5 / 127)])
def test_stored_dtypes_round_as_they_should(target, dtype, error):
    """A few values are much larger than the rest, as in residual streams: groups of 64 have a scale of their own."""
    info = dataclasses.replace(info_of(target, dtype), hidden_size=128)
    rng = np.random.default_rng(2)
    taps = rng.standard_normal((5, 4, 64)).astype(np.float32)
    taps[:, 1, 7] *= 1000
    taps[3] = 0
    rows = CacheRows(taps.reshape(5, 256), taps[:, :2].reshape(5, 128), taps[:, 0, 0])
    back = decode(info, encode(info, rows))
    largest = np.abs(taps).max(axis=-1, keepdims=True)
    assert (np.abs(back.taps_NxMH.reshape(taps.shape).astype(np.float32) - taps) <= error * 1.01 * largest).all()
    assert (back.log_total_N == rows.log_total_N).all()
    assert sum(a.nbytes for a in encode(info, rows).values()) == 5 * info.bytes_per_row


def test_many_writers_and_small_parts_give_the_same_rows(tmp_path, written, target, rows):
    for process in (1, 0):
        write(tmp_path / "c", target, rows, process=process, processes=2, part_bytes=1)
    assert len(list((tmp_path / "c").glob("part-00001-*"))) > 1
    cache, whole = (TargetCache(str(place), target, TAPS) for place in (tmp_path / "c", written))
    assert cache.rows == rows
    used = [n for n, row in enumerate(rows) if learnt_length(row, MAX_LENGTH)]
    lengths = [learnt_length(rows[n], MAX_LENGTH) for n in used]
    same(cache.read(used, lengths), whole.read(used, lengths))


def test_many_shards_are_one_array(tmp_path, target, monkeypatch):
    monkeypatch.setattr("dspark_jax.data.target_cache.SHARD_BYTES", 1)  # 64 rows a shard
    info, rng = info_of(target), np.random.default_rng(3)
    parts = [rng.standard_normal((n, 97)).astype(np.float32) for n in (50, 200, 1, 64, 5)]
    with CacheWriter(str(tmp_path), info, 5) as writer:
        for number, part in enumerate(parts):
            rows = CacheRows(part[:, :64], part[:, 64:96], part[:, 96])
            writer.add(number, {"id": str(number)}, len(part), rows)
    assert len(list((tmp_path / "part-00000-00000" / "taps").rglob("c/*/0"))) == 5
    cache = TargetCache(str(tmp_path), target, TAPS)
    got = cache.read([4, 1, 0], [5, 130, 50])
    for back, part in zip(got, (parts[4], parts[1][:130], parts[0]), strict=True):
        assert (np.concatenate([back.taps_NxMH, back.last_hidden_NxH, back.log_total_N[:, None]], axis=1) == part).all()
    shard = tmp_path / "part-00000-00000" / "taps" / "c" / "2" / "0"
    shard.write_bytes(shard.read_bytes()[:-1])
    cache.read([0, 1], [50, 70])  # not in it
    with pytest.raises(UserError, match="taps is damaged"):
        cache.read([1], [130])


def test_a_bucket_is_a_place_like_a_folder(target, rows):
    """In memory: nothing but TensorStore's own interface is used."""
    write("memory://bucket/cache", target, rows[:3])
    assert TargetCache("memory://bucket/cache", target, TAPS).rows == rows[:3]
    with pytest.raises(UserError, match="ftp://x: not a place for a cache"):
        TargetCache("ftp://x", target, TAPS)


@pytest.fixture(scope="module")
def servers():
    with storage_servers():
        yield


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_buckets_hold_what_folders_hold(servers, written, target, rows, scheme):
    """Written in two runs, the first of them killed, and read back; then an object is lost."""
    place = f"{scheme}://drafts/cache"
    killed = CacheWriter(place, info_of(target), len(rows), part_bytes=1)
    write_features(target, list(enumerate(rows))[:4], killed, batch_size=2)
    with pytest.raises(UserError, match="holds 4 of 8 sequences"):
        TargetCache(place, target, TAPS)
    assert write(place, target, rows) == 4 and write(place, target, rows) == 0
    ours, folder = TargetCache(place, target, TAPS), TargetCache(str(written), target, TAPS)
    assert ours.rows == folder.rows == rows
    numbers = [n for n, row in enumerate(rows) if learnt_length(row, MAX_LENGTH)]
    lengths = [learnt_length(rows[n], MAX_LENGTH) for n in numbers]
    same(ours.read(numbers, lengths), folder.read(numbers, lengths), error=0)

    store, part = open_store(place), ours.sequences[numbers[0]].part
    store.write(f"{part}/taps/c/0/0", None).result()
    with pytest.raises(UserError, match=f"{place}.*{part}"):
        TargetCache(place, target, TAPS).read(numbers, lengths)


def test_a_bucket_that_is_not_there_is_named(servers, target, rows):
    for scheme in ("gs", "s3"):
        with pytest.raises(UserError, match=f"{scheme}://nowhere/cache"):
            write(f"{scheme}://nowhere/cache", target, rows)


# ------------------------------------------------------------------------------------------------ interrupted writing


def test_a_killed_writer_goes_on_where_its_parts_end(tmp_path, target, rows):
    writer = CacheWriter(str(tmp_path), info_of(target), len(rows), part_bytes=1)
    write_features(target, list(enumerate(rows))[:4], writer, batch_size=2)
    writer.add(4, rows[4], 0, None)  # begun: without features, the part is not full; then killed
    with pytest.raises(UserError, match="holds 4 of 8 sequences: run prepare-features again"):
        TargetCache(str(tmp_path), target, TAPS)
    (begun,) = [p for p in tmp_path.glob("part-*") if not (p / "done.json").exists()]
    (begun / "rubbish").write_text("half a shard")
    assert write(tmp_path, target, rows) == 4
    assert TargetCache(str(tmp_path), target, TAPS).rows == rows
    assert not (begun / "rubbish").exists()
    assert write(tmp_path, target, rows) == 0


def test_more_answers_are_appended(tmp_path, target, rows):
    write(tmp_path, target, rows[:3])
    assert write(tmp_path, target, rows) == 5
    assert TargetCache(str(tmp_path), target, TAPS).rows == rows


def test_ctrl_c_keeps_what_was_computed(tmp_path, target, rows):
    with pytest.raises(KeyboardInterrupt), CacheWriter(str(tmp_path), info_of(target), len(rows)) as writer:
        write_features(target, list(enumerate(rows))[:4], writer, batch_size=2)
        raise KeyboardInterrupt
    assert write(tmp_path, target, rows) == 4


def test_a_full_disk_leaves_finished_parts(tmp_path, target, rows, monkeypatch):
    write(tmp_path, target, rows[:4], total=4)
    with monkeypatch.context() as patch:

        def write_fails(self, count):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(cache_writer._Part, "_write", write_fails)
        with pytest.raises(
            UserError, match="the disk is full; parts finished so far: 1. They stay, and the same command"
        ):
            write(tmp_path, target, rows, total=4)
    assert TargetCache(str(tmp_path), target, TAPS).rows == rows[:4]
    write(tmp_path, target, rows)
    assert TargetCache(str(tmp_path), target, TAPS).rows == rows


def test_a_place_that_cannot_be_written_is_named(tmp_path, target, rows):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/c.* cannot be written: .*"):
        write(tmp_path / "file" / "c", target, rows[:2])


def test_a_run_that_is_refused_leaves_nothing(tmp_path, target):
    CacheWriter(str(tmp_path / "c"), info_of(target), 3)
    assert not (tmp_path / "c").exists()


def test_the_size_is_told_and_refused_beforehand(tmp_path, target, monkeypatch):
    info = dataclasses.replace(info_of(target, "bfloat16"), hidden_size=2560, tap_layers=(1, 9, 17, 25, 33))
    assert info.bytes_per_row == 2 * 6 * 2560 + 4  # the reference's, without ids and masks
    assert "= 38 TB" in size_line("gs://bucket/cache", info, 1_237_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=10**9))
    assert "(1 GB free)" in size_line(str(tmp_path / "new"), info, 10)
    with pytest.raises(UserError, match="features do not fit.* = 38 TB .*has 1 GB free"):
        size_line(str(tmp_path / "new"), info, 1_237_000_000)


# --------------------------------------------------------------------------------------------------- damaged, foreign


def shard(place: Path, name: str) -> Path:
    return place / "part-00000-00000" / name / "c" / "0" / "0"


def damage_flip(place: Path):
    data = bytearray(shard(place, "taps").read_bytes())
    data[100] ^= 1
    shard(place, "taps").write_bytes(data)


def damage_cut(place: Path):
    shard(place, "last_hidden").write_bytes(shard(place, "last_hidden").read_bytes()[:-1])


def damage_lose(place: Path):
    shard(place, "log_total").unlink()


def damage_array(place: Path):
    (place / "part-00000-00000" / "taps" / "zarr.json").unlink()


@pytest.mark.parametrize(
    ("damage", "name"),
    [(damage_flip, "taps"), (damage_cut, "last_hidden"), (damage_lose, "log_total"), (damage_array, "taps")],
)
def test_damaged_arrays_are_named_and_mended(tmp_path, written, target, rows, damage, name):
    place = copy(written, tmp_path / "c")
    damage(place)
    cache = TargetCache(str(place), target, TAPS)
    with pytest.raises(UserError, match=rf"part-00000-00000/{name} is damaged or incomplete .*remove part-00000-00000"):
        cache.read([0], [24])
    for file in sorted((place / "part-00000-00000").rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    write(place, target, rows)
    same(TargetCache(str(place), target, TAPS).read([0], [24]), [own(target, rows[0], 24)])


def test_a_damaged_index_or_description_is_named(tmp_path, written, target):
    place = copy(written, tmp_path / "c")
    index = place / "part-00000-00000" / "index.jsonl"
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(UserError, match="index.jsonl is damaged or incomplete"):
        TargetCache(str(place), target, TAPS)
    (place / "cache.json").write_text('{"format": 7}')
    with pytest.raises(UserError, match="cache.json: format 7 is not 1"):
        TargetCache(str(place), target, TAPS)
    (place / "cache.json").write_text("{")
    with pytest.raises(UserError, match="cache.json cannot be read"):
        TargetCache(str(place), target, TAPS)


def test_a_foreign_cache_is_refused_by_name(tmp_path, written, target, rows):
    other = dataclasses.replace(target, params={**target.params, "embedding": target.params["embedding"] + 1})
    with pytest.raises(UserError, match="another target"):
        TargetCache(str(written), other, TAPS)
    with pytest.raises(UserError, match=r"another tap layers \(\(0, 2\), here \(2, 0\)\)"):
        TargetCache(str(written), target, (2, 0))
    with pytest.raises(UserError, match="another dtype"):
        write(written, target, rows, "int8")
    with pytest.raises(UserError, match="is no feature cache"):
        TargetCache(str(tmp_path), target, TAPS)
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="is not empty, and no feature cache"):
        write(tmp_path, target, rows)
    with pytest.raises(UserError, match="has 60 tokens of row q3, 61 are asked for: set data.max_length to at most 60"):
        TargetCache(str(written), target, TAPS).read([3], [61])
    with pytest.raises(UserError, match="data.cache_dtype='fp4'"):
        info_of(target, "fp4")


# -------------------------------------------------------------------------------------------------- from the engine


def test_answers_and_features_come_out_of_one_pass(tmp_path, target):
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5], [4] * 7]
    with CacheWriter(str(tmp_path), info_of(target, max_length=24), len(prompts)) as writer:
        sink, finish = sink_writer(writer, target)
        engine = Engine(target, strategy="off", max_slots=2, sink=sink)
        params = [SamplingParams(temperature=1.0, seed=n, max_tokens=n, ignore_eos=True) for n in (12, 30, 3)]
        for index, done in engine.stream_completions(prompts, params):
            finish(index, index, {"id": str(index), "prompt_ids": prompts[index], "answer_ids": done.token_ids})
    cache = TargetCache(str(tmp_path), target, TAPS)
    assert cache.lacks_last_rows
    lengths = [learnt_length(row, 24) for row in cache.rows]
    assert lengths == [15, 24, 0]
    for number, have in ((0, 14), (1, 24)):
        (got,) = cache.read([number], lengths[number : number + 1])
        same(got, own(target, cache.rows[number], have))


# ----------------------------------------------------------------------------------------------------------- training


def config_of(chat_model, folder, name):
    c = get_base()
    c.workdir, c.target.path = str(folder / name), str(chat_model)
    c.drafter.num_layers, c.drafter.block_size, c.drafter.tap_layers = 1, 4, TAPS
    c.drafter.mask_token, c.drafter.draft_vocab_size, c.drafter.markov_rank = "<|mask|>", 64, 8
    c.data.max_length = MAX_LENGTH
    c.train.steps, c.train.batch_size, c.train.num_anchors = 3, 3, 4
    c.train.log_every, c.train.checkpoint_every = 1, 2
    return c


def config_file(config, path: Path) -> str:
    imports = "import json\nfrom ml_collections import ConfigDict\n"
    path.write_text(f"{imports}def get_config():\n    return ConfigDict(json.loads({config.to_json()!r}))\n")
    return str(path)


def losses(config):
    loop.train(config)
    return [json.loads(line)["loss"] for line in (Path(config.workdir) / "metrics.jsonl").read_text().splitlines()]


def test_training_from_a_cache_has_the_losses_of_online_features(
    chat_model, tmp_path, target, rows, monkeypatch, capsys
):
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(loop, "training_rows", lambda config, target: rows)
    online = losses(config_of(chat_model, tmp_path, "online"))
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 2e-3), ("int8", 2e-3)):
        config = config_of(chat_model, tmp_path, dtype)
        config.data.features, config.data.cache = "cache", str(tmp_path / f"cache_{dtype}")
        config.data.cache_dtype = dtype
        command = [
            "prepare-features",
            f"--config={config_file(config, tmp_path / 'config.py')}",
            f"--answers={answers}",
        ]
        prepare_features.main(command)
        assert "bytes = " in capsys.readouterr().out
        assert losses(config) == pytest.approx(online, rel=tolerance)

    # As an engine would have written it: the last token's features are lacking, and nobody misses them.
    config = config_of(chat_model, tmp_path, "engine")
    config.data.features, config.data.cache = "cache", str(tmp_path / "engine_cache")
    with CacheWriter(config.data.cache, info_of(target), len(rows)) as writer:
        for number, row in enumerate(rows):
            length = learnt_length(row, MAX_LENGTH)
            writer.add(number, row, length, own(target, row, length - 1) if length else None)
    assert losses(config) == pytest.approx(online, rel=1e-5)
    config.drafter.kind = "eagle3"
    config.workdir = str(tmp_path / "eagle3")
    with pytest.raises(UserError, match="without the last tokens' features"):
        loop.train(config)


@pytest.mark.slow
def test_two_processes_share_the_rows(chat_model, tmp_path, target, rows):
    config = config_of(chat_model, tmp_path, "run")
    config.data.cache = str(tmp_path / "cache")
    Path(config.workdir).mkdir()
    (Path(config.workdir) / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [
        sys.executable,
        "-m",
        "dspark_jax",
        "prepare-features",
        f"--config={config_file(config, tmp_path / 'c.py')}",
    ]
    started = [
        subprocess.Popen([*command, f"--config.serve.processes={address},2,{i}"], cwd=ROOT, stderr=subprocess.PIPE)
        for i in range(2)
    ]
    for process in started:
        assert process.wait(timeout=300) == 0, process.stderr.read()[-2000:]
    cache = TargetCache(config.data.cache, target, TAPS)
    assert cache.rows == rows and {sequence.part for sequence in cache.sequences} == {
        "part-00000-00000",
        "part-00001-00000",
    }


def test_settings_that_cannot_be_are_refused(chat_model, tmp_path):
    config = config_of(chat_model, tmp_path, "a")
    config.data.features = "psychic"
    with pytest.raises(UserError, match="online or cache"):
        loop.train(config)
    config = config_of(chat_model, tmp_path, "b")
    config.data.features = "cache"
    with pytest.raises(UserError, match="set it to what prepare-features wrote"):
        loop.train(config)
    with pytest.raises(UserError, match="where to"):
        prepare_features.main(["prepare-features", f"--config={config_file(config, tmp_path / 'c.py')}"])
    (tmp_path / "bad.jsonl").write_text('{"id": "1", "text": "no answers"}\n')
    with pytest.raises(UserError, match="bad.jsonl, line 1: a row of answers has id, prompt_ids, answer_ids"):
        prepare_features.read_answers(tmp_path / "bad.jsonl")


# ------------------------------------------------------------------------------------------------ the reference's cache


def write_reference(folder: Path, target, rows, per_shard=3, **changes):
    """A version-2 cache by the documented layout."""
    folder.mkdir()
    shards, records = [], []
    for number, row in enumerate(rows):
        if number % per_shard == 0:
            shards.append(bytearray())
        ids = np.asarray(row["prompt_ids"] + row["answer_ids"], "<i4")
        mask = np.asarray([0] * len(row["prompt_ids"]) + [1] * len(row["answer_ids"]), np.uint8)
        features = own(target, row, len(ids))
        states = (features.taps_NxMH, features.last_hidden_NxH)
        blocks = [ids, np.ones_like(mask), mask, *(state.astype(ml_dtypes.bfloat16) for state in states)]
        offsets = []
        for block in blocks:
            offsets.append(len(shards[-1]))
            shards[-1] += block.tobytes()
        header = np.uint64(number).tobytes() + np.array([len(shards) - 1, len(ids)], "<u4").tobytes()
        records.append(header + np.array(offsets, "<u8").tobytes())
    names = [f"shard-{i:05d}.bin" for i in range(len(shards))]
    for name, data in zip(names, shards, strict=True):
        (folder / name).write_bytes(data)
    (folder / "samples.idx").write_bytes(b"".join(records))
    manifest = {"version": 2, "num_samples": len(rows), "num_shards": len(shards), "target_layer_ids": list(TAPS)}
    manifest |= {"hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8", "index_record_size": 56}
    manifest |= {"hidden_size": 32, "shards": [{"shard_id": i, "file_name": name} for i, name in enumerate(names)]}
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


def test_the_references_cache_is_read(tmp_path, target, rows):
    rows = [rows[0], rows[2], rows[4], rows[5], rows[1]]
    write_reference(tmp_path / "v2", target, rows)
    cache = open_cache(str(tmp_path / "v2"), target, TAPS)
    assert [row["prompt_ids"] for row in cache.rows] == [row["prompt_ids"] for row in rows]
    batches = Batches(cache.rows, 4, MAX_LENGTH, seed=0)
    batch, again = batches(0), Batches(rows, 4, MAX_LENGTH, seed=0)(0)
    assert (batch.loss_mask_BxS == again.loss_mask_BxS).all() and (batch.token_BxS == again.token_BxS).all()
    kept = np.arange(batch.token_BxS.shape[1]) < batch.length_B[:, None]
    got, want = CachedFeatures(target, cache)(batch), FeatureSource(target, keep=False)(batch)
    cut = lambda features: jax.tree.map(lambda a: np.asarray(a)[kept], features)  # noqa: E731
    same(cut(got), cut(want), 1e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 1}, "manifest.json: version 1, only 2 is read"),
        ({"target_layer_ids": [0, 1]}, r"target_layer_ids is \[0, 1\], this config and its target need \[0, 2\]"),
        ({"hidden_size": 64}, "hidden_size is 64, this config and its target need 32"),
        ({"hidden_dtype": "float8"}, "hidden_dtype is float8"),
        ({"shards": [{"shard_id": 1}]}, "manifest.json does not list its shards"),
        ({"num_samples": 4}, "samples.idx has 168 bytes, 4 samples need 224"),
    ],
)
def test_a_manifest_that_does_not_fit_is_named(tmp_path, target, rows, changes, message):
    write_reference(tmp_path / "v2", target, rows[:3], **changes)
    with pytest.raises(UserError, match=message):
        open_cache(str(tmp_path / "v2"), target, TAPS)


def test_damaged_files_of_the_reference_are_named(tmp_path, target, rows):
    write_reference(tmp_path / "v2", target, rows[:3], per_shard=2)
    last = tmp_path / "v2" / "shard-00001.bin"
    data = last.read_bytes()
    last.write_bytes(data[:-1])
    with pytest.raises(UserError, match="shard-00001.bin has .* truncated or missing, copy it again"):
        open_cache(str(tmp_path / "v2"), target, TAPS)
    last.write_bytes(data)
    index = tmp_path / "v2" / "samples.idx"
    records = bytearray(index.read_bytes())
    records[56 + 12] += 1
    index.write_bytes(records)
    with pytest.raises(UserError, match="the record of sample 1 does not fit"):
        open_cache(str(tmp_path / "v2"), target, TAPS)


def test_the_references_cache_of_another_model_is_told_by_its_states(tmp_path, target, rows):
    write_reference(tmp_path / "v2", target, rows[:2])
    norm = {"scale": -target.params["norm"]["scale"]}
    other = dataclasses.replace(target, params={**target.params, "norm": norm})
    with pytest.raises(UserError, match="the last hidden states of its first sample are 200% off this target's"):
        open_cache(str(tmp_path / "v2"), other, TAPS)
