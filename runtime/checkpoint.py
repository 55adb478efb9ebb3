"""A minimal save of a run, for going on with the same plan.

    DIR/step-00000100/rank-00000.safetensors ...   parameters and optimizer state of each rank
    DIR/step-00000100/manifest.json                step, plan hash, sha256 and size of each file; itself with a hash

All is written into `step-00000100.tmp`; when every rank's file is on disk rank 0 adds the manifest and renames the
folder, so a save is whole or not there. The last two are kept. Gradients are not saved: a step begins with zeros.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.grammar.diagnostics import Diagnostic, Note, TitanError

if TYPE_CHECKING:
    from titan.runtime.state import State
    from titan.runtime.world import World
    from torch import Tensor

FORMAT = 1
KEPT = 2
SAVED_KINDS = ("p.", "o.")  # buffers of parameters and of optimizer state
MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{8,})\Z")


@dataclass(frozen=True, slots=True)
class Saved:
    """A whole save: steps done, optimizer updates taken, the plan's hash, (sha256, bytes) of each file."""

    folder: Path
    step: int
    updates: int
    plan_hash: str
    files: dict[str, tuple[str, int]]


def save(folder: Path, plan_hash: str, step: int, state: State, world: World) -> bool:
    """Every rank calls it after `step` steps. True when the save is whole and in place; False when the run was aborted
    meanwhile. Errors: T603 when the disk refuses."""
    from torch._C._distributed_c10d import PrefixStore

    target = folder / f"step-{step:08d}"
    partial = target.with_name(target.name + ".tmp")
    keys = PrefixStore(f"save/{world.generation}/{step}", world.store)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        keys.set(str(world.rank), json.dumps(_write(partial / _file_name(world.rank), state, step, plan_hash)))
        if world.rank == 0:
            names = [str(rank) for rank in range(world.size)]
            if not _present(keys, names, world):
                return False
            files = {_file_name(int(name)): json.loads(keys.get(name)) for name in names}
            _publish(target, partial, {"step": step, "updates": state.updates, "plan": plan_hash, "files": files})
            keys.set("done", "1")
    except OSError as error:
        message = f"the save of step {step} cannot be written to {target}: {error.strerror or error}"
        raise TitanError(Diagnostic("T603", message), exit_code=1) from None
    return _present(keys, ["done"], world)


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _write(path: Path, state: State, step: int, plan_hash: str) -> tuple[str, int]:
    """One rank's file, on disk when this returns; its sha256 and size."""
    from safetensors.torch import save_file

    tensors = {name: tensor.cpu() for name, tensor in state.buffers.items() if name.startswith(SAVED_KINDS)}
    part = path.with_suffix(".part")
    about = json.dumps({"rank": state.rank, "step": step, "plan": plan_hash})
    save_file(tensors, part, metadata={"titan": about})  # one key: of several the order is not fixed
    with part.open("rb+") as stream:
        os.fsync(stream.fileno())
    part.replace(path)
    return _digest(path)


def _digest(path: Path) -> tuple[str, int]:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest(), os.fstat(stream.fileno()).st_size


def _present(keys: Any, names: list[str], world: World) -> bool:
    """Waits for keys of the store, looking at the abort flag meanwhile."""
    while not keys.check(names):
        if world.control.aborted():
            return False
        time.sleep(0.005)
    return True


def _publish(target: Path, partial: Path, body: dict[str, Any]) -> None:
    """Manifest, rename, and only then the removal of what is older."""
    text = json.dumps({"format": FORMAT, **body}, sort_keys=True)
    sealed = json.dumps({"body": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    with (partial / MANIFEST).open("w") as stream:
        stream.write(sealed)
        stream.flush()
        os.fsync(stream.fileno())
    _sync_folder(partial)
    if target.exists():  # the same step was saved before, by the run that this one goes on from
        shutil.rmtree(partial)
    else:
        partial.rename(target)
    _sync_folder(target.parent)
    for old in _steps(target.parent)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
    for left in target.parent.glob("step-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _steps(folder: Path) -> list[Path]:
    """Folders of whole saves, newest first."""
    found = [path for path in folder.glob("step-*") if _STEP.match(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def has_saves(folder: Path) -> bool:
    return bool(_steps(folder))


def find(folder: Path, plan_hash: str, world_size: int) -> Saved:
    """The newest save in a run's folder, in its `checkpoints`, or the save that the folder itself is.

    Errors: T620 none is there, T621 of another plan, T622 damaged.
    """
    places = [folder] if (folder / MANIFEST).is_file() else [*_steps(folder / "checkpoints"), *_steps(folder)]
    if not places:
        raise TitanError(Diagnostic("T620", f"there is no checkpoint in {folder}", nearest=_other_runs(folder)))
    saved = _read(places[0])
    if saved.plan_hash != plan_hash:
        message = (
            f"the checkpoint {saved.folder} was made with plan {saved.plan_hash[:16]}, this is plan {plan_hash[:16]}"
        )
        notes = (Note("going on needs the same plan; the run's folder holds it as run.plan"),)
        raise TitanError(Diagnostic("T621", message, notes=notes))
    expected = {_file_name(rank) for rank in range(world_size)}
    if set(saved.files) != expected:
        raise TitanError(_damaged(saved.folder, f"its manifest lists {len(saved.files)} files for {world_size} ranks"))
    return saved


def _other_runs(folder: Path) -> tuple[str, ...]:
    """Neighbouring folders that do hold saves."""
    if not folder.parent.is_dir():
        return ()
    runs = (path for path in sorted(folder.parent.iterdir()) if path.is_dir() and path != folder)
    return tuple(str(path) for path in runs if _steps(path / "checkpoints"))[-3:]


def _read(folder: Path) -> Saved:
    try:
        sealed = json.loads((folder / MANIFEST).read_bytes())
        text = sealed["body"]
        if hashlib.sha256(text.encode()).hexdigest() != sealed["sha256"]:
            raise ValueError("the manifest's hash differs")
        body = json.loads(text)
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']}, this program reads {FORMAT}")
        files = {str(name): (str(digest), int(size)) for name, (digest, size) in body["files"].items()}
        return Saved(folder, int(body["step"]), int(body["updates"]), str(body["plan"]), files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TitanError(_damaged(folder, f"{MANIFEST} cannot be used: {error}")) from None


def _damaged(folder: Path, what: str) -> Diagnostic:
    older = [str(path) for path in _steps(folder.parent) if path.name < folder.name][:1]
    return Diagnostic("T622", f"the checkpoint {folder} is damaged: {what}", nearest=tuple(older))


def load(saved: Saved, state: State) -> None:
    """Fills one rank's buffers; its file is compared with the manifest's hash first. Errors: T622."""
    from safetensors import SafetensorError, safe_open

    name = _file_name(state.rank)
    path = saved.folder / name
    wanted = {key: tensor for key, tensor in state.buffers.items() if key.startswith(SAVED_KINDS)}
    try:
        if _digest(path) != saved.files[name]:
            raise ValueError("its bytes differ from what was written")
        with safe_open(path, framework="pt") as file:
            if set(file.keys()) != set(wanted):
                raise ValueError("it holds other buffers than the plan declares")
        for key, tensor in wanted.items():  # opened for each: what is mapped stays in memory until it is closed
            with safe_open(path, framework="pt") as file:
                _copy(tensor, file.get_tensor(key), key)
    except (OSError, ValueError, SafetensorError) as error:
        raise TitanError(_damaged(saved.folder, f"{name}: {error}")) from None
    state.updates = saved.updates


def _copy(target: Tensor, value: Tensor, name: str) -> None:
    if value.shape != target.shape or value.dtype != target.dtype:
        raise ValueError(f"{name} is {value.dtype} {list(value.shape)}, must be {target.dtype} {list(target.shape)}")
    target.copy_(value)
