"""From a dense model to a folder of compressed weights: block by block, one block in memory at a time.

Each linear is solved on the inputs that the compressed model in front of it really gives. Finished blocks are kept in
a work folder, so a killed run goes on where it stopped, with the same result to the bit.
"""

from __future__ import annotations

import copy
import glob
import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spearfish import checkpoint, models, text
from spearfish.compress import methods, reconstruct, recover, report, sensitivity, written
from spearfish.compress.fit import refuse_unfit
from spearfish.compress.hessian import Hessian
from spearfish.compress.recipe import Recipe, matches
from spearfish.compress.recover import Recovery, Settings, tokens_that_fit
from spearfish.compress.replay import REPLAYS
from spearfish.compress.solve import present, solve_group
from spearfish.compress.walk import Walker, bfloat16_is_faster
from spearfish.compress.workfolder import WorkFolder, load_with_facts, save_atomically
from spearfish.errors import FormatError, SpearfishError
from spearfish.models import DenseModel
from spearfish.reference import dequantize
from spearfish.scheme import QuantWeight

log = logging.getLogger(__name__)

# Of the time for recovery, if the model writes the text for it: about as much as recovery then learns from once.
WRITING_SHARE = 0.35
MOST_WRITTEN = 1 << 26  # tokens
TEXTS_A_WINDOW = 2  # when recovery's text is written on a GPU: half as long, they take four fifths of the time
PROSE_SHARE = 0.3  # of what recovery learns on, if prose is mixed into other text
PROSE_PASSES = 4  # through the prose at most, for one through the other text

# Layers are solved on so many tokens at most, training takes all. (With a million added up to Hessians, two runs side
# by side had not ended after four minutes of an H200; with this limit one takes two.)
SOLVED_ON = 1 << 18

WRITERS = {"self_attn.o_proj": "in", "mlp.down_proj": "out"}  # see Walker.lag
# Where their outputs are added as they are. Gemma's pass a norm first; its writers do not answer for the stream.
PLAIN_STREAM = ("llama", "mistral", "qwen2", "qwen3")

RECOVERY = "recovery.safetensors"
RECOVERY_TEXT = "recovery-text.safetensors"
CALIBRATION_TEXT = "calibration-text.safetensors"

# Called as progress(stage, done, total, note).
Progress = Callable[[str, int, int, str], None]


def _silent(stage: str, done: int, total: int, note: str) -> None:
    pass


def compress(
    model: str | Path | DenseModel,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    device: str | torch.device = "cpu",
    overwrite: bool = False,
    format: str = "marlin_24",
    force_generic: bool = False,
    progress: Progress = _silent,
    fast: bool | None = None,
    keep_work: bool = False,
) -> report.Report:
    """Compresses `model` (folder, hub name, GGUF, `package:NAME`) into the folder `out` and returns the report, which
    also lies there as report.json.

    device: where blocks are solved. fast: bfloat16 products in the forward passes; None looks whether that pays here.
    keep_work: leave the finished blocks in `out`.work, where a later run takes them up whose recipe differs in recovery
    alone.
    Raises SpearfishError for a bad recipe, model or text, before any work; an existing `out` needs `overwrite`.
    """
    recipe = recipe or Recipe()
    target = Path(out).expanduser().absolute()
    checkpoint.refuse_target(target, None, overwrite)  # before a GGUF file is taken apart
    _refuse(recipe)
    if recipe.catch_up is None:
        recipe = replace(recipe, catch_up=methods.METHODS[recipe.method].catch_up)
    dense = model if isinstance(model, DenseModel) else models.load_dense(model, force_generic)
    checkpoint.refuse_target(target, dense.folder.absolute(), overwrite)
    device = torch.device(device)
    start = time.perf_counter()
    fast = bfloat16_is_faster(device) if fast is None else fast

    walker = Walker(dense, device, fast)
    refuse_unfit(walker, recipe, format)
    follow = recipe.reconstruct > 0 or bool(recipe.catch_up)  # whether the dense model's states are wanted all along
    with WorkFolder(target.with_name(f"{target.name}.work")) as work:
        plan = _plan(dense, recipe, fast)
        work.check(plan)  # before text is written that would take the place of an unfinished run's
        tokens = _calibration(dense, recipe, device, fast, work.path / CALIBRATION_TEXT, progress)
        work.begin(plan | {"tokens": tokens.sha256})
        walker.home = home(device, recipe, int(dense.config.get("hidden_size", 0)))
        result = report.Report(
            model=dense.name,
            out=str(out),
            recipe=recipe.to_dict(),
            calibration={
                "source": tokens.source,
                "windows": recipe.num_samples,
                "length": recipe.seq_len,
                "tokens": tokens.tokens.numel(),
                "seed": recipe.seed,
                "sha256": tokens.sha256,
            },
            memory_estimate=estimate_memory(dense, walker, recipe),
        )
        _warn_about_memory(result, device)
        next_block, *states = work.load_hidden()
        hidden, goal = (None if state is None else state.to(walker.home) for state in states)
        if next_block:
            log.info("going on at block %d of %d", next_block, len(walker.paths))
        first = walker.embed(tokens.tokens)
        solving = _within_budget(walker, first, recipe, work, result, progress) if recipe.budget else recipe
        if hidden is None:
            hidden, goal = first, first if follow else None
        del first
        for indices in _side_by_side(len(walker.paths), recipe):
            if indices[0] >= next_block:
                hidden, goal = _do_blocks(walker, indices, hidden, goal, recipe, solving, work, progress)
                if work.is_time_for(hidden, last=indices[-1] + 1 == len(walker.paths)):
                    work.save_hidden(indices[-1] + 1, hidden, goal)
            for index in indices:
                weights, reports, outcome = work.load_block(index)
                result.layers += reports
                result.reconstruct += [outcome] if outcome else []
                _tell_left_out(walker, index, weights, recipe, result)
        progress("blocks", len(walker.paths), len(walker.paths), "")
        REPLAYS.clear()
        result.judge()
        gains: dict[str, torch.Tensor] = {}
        recovered: dict[str, QuantWeight] = {}
        if recipe.recover or recipe.recover_steps:
            recovered, gains = _recover(dense, walker, recipe, work, result, progress)

        progress("writing", 0, 1, str(out))
        with checkpoint.CheckpointWriter(
            target,
            source=dense.folder,
            config=dense.config,
            format=format,
            recipe=recipe.to_dict(),
            overwrite=overwrite,
        ) as writer:
            packed: set[str] = set()
            for index in range(len(walker.paths)):
                for name, weight in work.load_block(index)[0].items():
                    writer.add_weight(name, recovered.get(name, weight))
                    packed.add(f"{name}.weight")
            for name in dense.reader.names():
                if name not in packed:
                    stored = dense.reader.tensor(name)
                    writer.add_tensor(name, gains[name].to(stored.dtype) if name in gains else stored)
            result.bytes_before = sum(file.stat().st_size for file in dense.folder.glob("*.safetensors"))
            result.bytes_after = writer.nbytes
            result.seconds = time.perf_counter() - start
            result.memory_peak = peak_memory(device)
            writer.add_file("report.json", result.to_json())  # appears with the weights, or not at all
        progress("writing", 1, 1, str(out))
        if keep_work:
            (work.path / RECOVERY).unlink(missing_ok=True)
        else:
            work.delete()
    return result


def _refuse(recipe: Recipe) -> None:
    """Raises SpearfishError for what cannot be done together, before any work."""
    if recipe.method not in methods.METHODS:
        raise SpearfishError(f"there is no method {recipe.method!r}; choose one of {', '.join(methods.METHODS)}")
    if recipe.bits == 16 and (recipe.recover or recipe.recover_steps):
        raise SpearfishError("recovery trains codes and scales: bits must be 4 or 8, got 16")
    if recipe.bits == 16 and recipe.reconstruct:
        raise SpearfishError("reconstruction trains codes and scales: bits must be 4 or 8, got 16")
    if recipe.together > 1 and not recipe.reconstruct:
        raise SpearfishError(
            f"{recipe.together} blocks together is for reconstruction, which has no steps to train them; give"
            " --reconstruct, or leave --together out"
        )
    if recipe.budget and (recipe.bits == 16 or not methods.METHODS[recipe.method].prunes):
        raise SpearfishError(
            f"a budget of dense quantised layers needs a method that prunes the others, in 4 or 8 bits; got"
            f" {recipe.method} in {recipe.bits} bits"
        )


def _within_budget(
    walker: Walker,
    hidden: torch.Tensor,
    recipe: Recipe,
    work: WorkFolder,
    result: report.Report,
    progress: Progress,
) -> Recipe:
    """The recipe with the layers that its budget keeps dense, found by a walk through the dense model of its own (which
    a killed run repeats if it had not ended). `hidden` is what the first block receives."""
    stored = work.load_facts("sensitivity")
    if stored is None:
        units = []
        part = hidden[: sensitivity.WINDOWS]
        for index, path in enumerate(walker.paths):
            progress("budget", index, len(walker.paths), path)
            walker.load(index)
            units += sensitivity.measure_block(walker, index, part, recipe)
            part = walker.forward(index, part)
            walker.release(index)
        progress("budget", len(walker.paths), len(walker.paths), "")
        work.save_facts("sensitivity", [unit.to_dict() for unit in units])
    else:
        try:
            units = [sensitivity.Unit.from_dict(unit) for unit in stored]
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"{work.path} holds a damaged sensitivity file; delete the folder to start anew"
            ) from error
    chosen = sensitivity.choose(units, recipe.budget, recipe.dense_layers)
    fixed = [unit for unit in units if unit.is_dense_in(recipe.dense_layers)]
    result.budget = {
        "fraction": recipe.budget,
        "bytes_if_all_dense": sum(unit.nbytes for unit in units),
        "bytes_kept_dense": sum(unit.nbytes for unit in chosen + fixed),
        "error_added": sum(unit.sparse for unit in units),
        "error_saved": sum(unit.sparse - unit.dense for unit in chosen + fixed),
        "kept_dense": [unit.to_dict() for unit in chosen],
        "dense_by_recipe": [unit.to_dict() for unit in fixed],
        "pruned": [unit.to_dict() for unit in units if unit not in chosen + fixed],
    }
    names = tuple(glob.escape(name) for unit in chosen for name in unit.layers)
    return replace(recipe, dense_layers=recipe.dense_layers + names)


def _recover(
    dense: DenseModel, walker: Walker, recipe: Recipe, work: WorkFolder, result: report.Report, progress: Progress
) -> tuple[dict[str, QuantWeight], dict[str, torch.Tensor]]:
    """Distillation from the dense model over all blocks at once; both models must fit into memory."""
    asked = [recipe.recover, recipe.recover_text, recipe.recover_steps]
    if work.load_facts("recovery-asked") != asked:  # the blocks serve every recovery, what one has learnt only that one
        for name in (RECOVERY, RECOVERY_TEXT):
            (work.path / name).unlink(missing_ok=True)
        work.save_facts("recovery-asked", asked)
    changes = recover.settings_on(walker.device)
    settings = Settings(budget=recipe.recover, steps=recipe.recover_steps, seed=recipe.seed, **changes)
    weights = {name: w for i in range(len(walker.paths)) for name, w in work.load_block(i)[0].items()}
    recovery = Recovery(dense, weights, settings, walker.device, walker.fast)
    if walker.device.type == "cuda":
        free = int(0.9 * torch.cuda.mem_get_info(walker.device)[0])
        settings = replace(settings, tokens=tokens_that_fit(settings.tokens, settings.length, free, dense.config))
    source, prose = _text_of_recovery(recipe, walker.device)
    begin = time.perf_counter()
    if source == written.NAME:
        cut = _kept_text(work.path / CALIBRATION_TEXT)
        if cut is None or recipe.calibration != written.NAME or cut.shape[1] != settings.length:
            cut = torch.empty(0, settings.length, dtype=torch.int64)
        wanted = MOST_WRITTEN // settings.length
        if settings.steps:
            wanted = min(wanted, settings.steps * max(1, settings.tokens // settings.length))
        if wanted > len(cut):
            limit = WRITING_SHARE * settings.budget if not settings.steps else None
            more = _written(
                recovery.teacher, dense.tokenizer(), wanted - len(cut), settings.length, recipe.seed + 1,
                work.path / RECOVERY_TEXT, limit, progress,
                texts=TEXTS_A_WINDOW if walker.device.type == "cuda" else 1,
            )  # fmt: skip
            cut = torch.cat((cut, more))
    else:
        cut = text.cut_windows(dense.tokenizer(), text.read_text(source), settings.length)
    if not len(cut):
        raise SpearfishError(f"{source} is shorter than one window of {settings.length} tokens")
    if prose:
        cut = _mixed(cut, text.head(dense.tokenizer(), prose, len(cut), settings.length), recipe.seed)
    took = time.perf_counter() - begin
    recovery.settings = replace(settings, budget=max(settings.budget - took, 0.0))
    recovery.run(cut, work.path / RECOVERY, progress)
    if not recovery.step:
        result.warnings.append(
            f"recovery: its {settings.budget:.0f} s were over before the first step, text took {took:.0f} s of them"
        )
    result.recover = recovery.summary() | {
        "source": f"{source}+{prose}" if prose else source,
        "tokens_of_text": cut.numel(),
        "seconds_of_reading": took,
    }
    return recovery.results()


def home(device: torch.device, recipe: Recipe, width: int) -> torch.device:
    """Where the hidden states of all windows live: on a GPU if they take no more than three fifths of what is free."""
    each = 6 * 4 + (2 * recipe.together if recipe.reconstruct else 0)  # bytes for a number of a hidden state
    nbytes = each * recipe.num_samples * recipe.seq_len * width
    fits = device.type == "cuda" and nbytes < torch.cuda.mem_get_info(device)[0] * 0.6
    return device if fits else torch.device("cpu")


def _calibration(
    dense: DenseModel, recipe: Recipe, device: torch.device, fast: bool, file: Path, progress: Progress
) -> text.Windows:
    limit = dense.config.get("max_position_embeddings")
    if recipe.calibration != written.NAME:
        return text.windows(
            dense.tokenizer(), recipe.calibration, recipe.num_samples, recipe.seq_len, recipe.seed, limit
        )
    text.refuse_long(recipe.seq_len, limit)
    model = dense.whole(device, torch.bfloat16 if fast else torch.float32)
    count = recipe.num_samples
    if device.type == "cuda" and recipe.recover and _text_of_recovery(recipe, device)[0] == written.NAME:
        count = max(count, written.AT_ONCE)  # takes hardly longer, and recovery learns on the rest
    tokens = _written(
        model, dense.tokenizer(), count, recipe.seq_len, recipe.seed, file, None, progress, recipe.num_samples
    )
    return text.Windows(tokens[: recipe.num_samples], written.NAME)


def _text_of_recovery(recipe: Recipe, device: torch.device) -> tuple[str, str]:
    """The source, "auto" resolved, and the one whose prose is mixed into it ("" for none), as in "self+notes.txt"."""
    source, prose = recipe.recover_text, ""
    if not Path(source).exists():  # a file's name may have a plus in it
        source, _, prose = source.partition("+")
    if source == "auto":
        source = written.NAME if device.type == "cuda" else "articles"
    return source, prose


def _mixed(bulk: torch.Tensor, prose: torch.Tensor, seed: int) -> torch.Tensor:
    """int64 [count, length]: all windows of the bulk, and so many of the prose as its share wants and its passes
    allow."""
    wanted = min(round(len(bulk) * PROSE_SHARE / (1 - PROSE_SHARE)), PROSE_PASSES * len(prose))
    prose = prose[torch.randperm(len(prose), generator=torch.Generator().manual_seed(seed))]
    return torch.cat((bulk, prose.repeat(PROSE_PASSES, 1)[:wanted]))


def _kept_text(file: Path) -> torch.Tensor | None:
    """int64 [count, length] of an earlier `_written`, or None."""
    return load_with_facts(file)[0]["tokens"].long() if file.exists() else None


def _written(
    model: nn.Module,
    tokenizer: Any,
    count: int,
    length: int,
    seed: int,
    file: Path,
    seconds: float | None,
    progress: Progress,
    least: int = 1 << 62,
    texts: int = 1,
) -> torch.Tensor:
    """What the model writes, kept in the work folder: a run that goes on needs the same text, to the token. `least`:
    so many windows are enough if they are there."""
    facts = {"count": count, "length": length, "seed": seed}
    if file.exists():
        tensors, stored = load_with_facts(file)
        same = {name: stored.get(name) for name in ("length", "seed")} == {"length": length, "seed": seed}
        if "tokens" in tensors and same and (stored == facts or len(tensors["tokens"]) >= least):
            return tensors["tokens"].long()
    tokens = written.write(model, tokenizer, count, length, seed, seconds, progress, texts)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_atomically({"tokens": tokens.int()}, file, facts)
    return tokens


def _plan(dense: DenseModel, recipe: Recipe, fast: bool) -> dict[str, Any]:
    """What must be equal for an unfinished run to be this one, but for its text."""
    shards = sorted(set(dense.reader.files.values()))
    sizes = {file.name: file.stat().st_size for file in shards}
    # The headers hold every tensor's name, shape and place.
    headers = hashlib.sha256()
    for file in shards:
        with file.open("rb") as handle:
            headers.update(handle.read(int.from_bytes(handle.read(8), "little")))
    return {
        "recipe": recipe.to_dict() | {"recover": 0, "recover_text": "", "recover_steps": None},
        "config": json.loads(json.dumps(dense.config)),
        "shards": sizes,
        "headers": headers.hexdigest(),
        "bfloat16": fast,
    }


def _side_by_side(count: int, recipe: Recipe) -> list[range]:
    """The blocks that are trained together, or each by itself."""
    each = recipe.together if recipe.reconstruct else 1
    return [range(first, min(first + each, count)) for first in range(0, count, each)]


def _do_blocks(
    walker: Walker,
    indices: range,
    hidden: torch.Tensor,
    goal: torch.Tensor | None,
    recipe: Recipe,
    solving: Recipe,
    work: WorkFolder,
    progress: Progress,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Solves blocks one after the other, then lets them learn together, and saves them. Returns what the next block
    receives, and what the dense model has there if `goal`, which it has here, is given."""
    count, first = len(walker.paths), hidden
    done: dict[int, tuple[dict[str, QuantWeight], list[report.LayerReport]]] = {}
    goals: list[torch.Tensor] = []
    part = slice(max(1, SOLVED_ON // recipe.seq_len))
    for index in indices:
        progress("blocks", index, count, walker.paths[index])
        walker.load(index)
        before = goal
        goal = None if goal is None else walker.forward(index, goal)
        done[index] = _solve_block(walker, index, hidden[part], solving, None if before is None else before[part])
        if recipe.reconstruct and goal is not None:
            goals.append(goal.bfloat16() if walker.fast else goal)  # many of them, and the products are no finer
        if index != indices[-1] or not recipe.reconstruct:
            hidden = walker.forward(index, hidden)
    outcome = None
    if recipe.reconstruct:
        weights = {name: weight for found, _ in done.values() for name, weight in found.items()}
        if weights and goals:
            progress("blocks", indices[-1], count, f"{walker.paths[indices[-1]]}, training")
            settings = reconstruct.Settings(
                recipe.reconstruct, seed=recipe.seed, **reconstruct.settings_on(walker.device)
            )
            weights, trained = reconstruct.reconstruct(walker, indices, weights, first, goals, settings)
            outcome = trained.to_dict()
        done = {index: ({name: weights[name] for name in found}, told) for index, (found, told) in done.items()}
        hidden = first
        for index in indices:
            hidden = walker.forward(index, hidden)
    for index, (found, told) in done.items():
        walker.release(index)
        work.save_block(index, found, told, outcome if index == indices[-1] else None)
    return hidden, goal


def _solve_block(
    walker: Walker,
    index: int,
    hidden: torch.Tensor,
    recipe: Recipe,
    goal: torch.Tensor | None = None,
) -> tuple[dict[str, QuantWeight], list[report.LayerReport]]:
    """Solves every linear of one block in the order of the forward pass, and leaves the compressed values in it. goal:
    what the dense model has where the compressed one has `hidden`; needed if the recipe catches up."""
    path = walker.paths[index]
    block = walker.net.get_submodule(path)
    twin = copy.deepcopy(block) if recipe.catch_up and goal is not None else None
    weights: dict[str, QuantWeight] = {}
    reports: list[report.LayerReport] = []
    for group in walker.model.architecture.linears:
        named = present(block, path, group)
        linears = {name: module for name, module in named.items() if not matches(name, recipe.ignore)}
        if not linears:
            continue
        modules = list(linears.values())
        for name, module in linears.items():
            if not isinstance(module, nn.Linear):
                raise SpearfishError(f"{name} is {type(module).__name__}, wanted nn.Linear; leave it out with --ignore")
        hessian = Hessian(modules[0].in_features, walker.device, recipe.equal_norm)  # type: ignore[arg-type]
        if twin is not None and goal is not None:
            local = tuple(name.removeprefix(f"{path}.") for name in linears)
            residual = WRITERS.get(local[0], "") if walker.model.model_type in PLAIN_STREAM else ""
            ran = walker.lag(index, local, hidden, twin, goal, residual, hessian.add)
        else:
            ran = walker.inputs(index, modules[0], hidden, hessian.add)
        if not ran:
            continue  # `_tell_left_out` says so
        found = solve_group(linears, hessian, recipe)  # type: ignore[arg-type]
        for name, (weight, layer) in found.items():
            if weight.scheme.bits == 16:  # solved in float32, stored in the model's own type
                weight = replace(weight, codes=weight.codes.to(walker.model.reader.entries[f"{name}.weight"].dtype))
            weights[name] = weight
            reports.append(layer)
            linears[name].weight.data.copy_(dequantize(weight))  # type: ignore[operator]
    return weights, reports


def _tell_left_out(
    walker: Walker, index: int, weights: dict[str, QuantWeight], recipe: Recipe, result: report.Report
) -> None:
    """Puts into the report which linears of a finished block stay as they are, and warns of those that nobody wanted to
    leave out."""
    path = walker.paths[index]
    block = walker.net.get_submodule(path)
    for group in walker.model.architecture.linears:
        left = [name for name in present(block, path, group) if name not in weights]
        result.ignored += left
        if unreached := [name for name in left if not matches(name, recipe.ignore)]:
            result.warnings.append(f"{', '.join(unreached)}: never reached by the calibration text, left as they are")


def estimate_memory(dense: DenseModel, walker: Walker, recipe: Recipe) -> int:
    """Bytes that the run will need at its worst moment, from shapes alone: one block, two copies of the hidden states,
    and the solver's working set for the largest group of linears; or, if that is more, a block's reconstruction, or
    recovery with both models."""
    block = walker.net.get_submodule(walker.paths[0])
    weights = sum(p.numel() for p in block.parameters())
    width = int(dense.config.get("hidden_size", 0))
    together = recipe.together if recipe.reconstruct else 1
    states = 3 + together if recipe.reconstruct or recipe.catch_up else 2
    hidden = states * recipe.num_samples * recipe.seq_len * width
    solver = 0
    for group in dense.architecture.linears:
        linears = [m for m in present(block, "", group).values() if isinstance(m, nn.Linear)]
        if linears:
            n, k = sum(m.out_features for m in linears), linears[0].in_features
            solver = max(solver, 8 * k * k + 12 * n * k)
    inside = f"{dense.architecture.blocks}."
    outside = sum(p.numel() for name, p in walker.net.named_parameters() if not name.startswith(inside))
    interpreter = 500_000_000
    # Training a block holds, in float32: code, gradient, two moments, and the value on the grid with its scale.
    training = (7 * together - 1) * weights if recipe.reconstruct else 0
    if recipe.catch_up:  # the dense block beside the one at work, and what the largest group lags behind
        solver += weights
    blocks = 4 * max(weights + hidden + max(solver, training), outside + hidden) + interpreter
    if not (recipe.recover or recipe.recover_steps):
        return blocks
    # Per trained weight: code, gradient and two moments in float32, the rounded value, its scale and the finished
    # weight in 16 bit, the mask, the teacher's weight; then what a step's activations and predictions take.
    trained = weights * len(walker.paths)
    return max(blocks, 25 * trained + 8 * outside + 1_500_000_000 + interpreter)


def _warn_about_memory(result: report.Report, device: torch.device) -> None:
    available = available_memory(device)
    if available is not None and result.memory_estimate > available:
        result.warnings.append(
            f"memory: about {result.memory_estimate / 2**30:.1f} GiB are needed, {available / 2**30:.1f} GiB are free;"
            " lower --num-samples or --seq-len"
        )
    for warning in result.warnings:
        log.warning("%s", warning)


def available_memory(device: torch.device) -> int | None:
    """Free bytes on the device, or None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def peak_memory(device: torch.device) -> int:
    """Bytes: the process's peak on a CPU, the allocator's on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
