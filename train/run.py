"""Train a draft model: `python -m train.run [+experiment=NAME] [key=value ...]`.

The same program under `accelerate launch -m train.run` uses several processes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, OmegaConfBaseException

import dlite.checkpoint
from dlite.files import writable
from dlite.model.config import DraftConfig
from dlite.model.drafter import DraftModel
from dlite.target import TargetModel
from dlite.weights import read_tensors, warm_start
from train import cache, distributed
from train.cache import CachedStates
from train.config import StageConfig, TrainConfig, check
from train.counts import token_counts
from train.data import Sample, load_samples
from train.loop import Data, Fit, num_steps
from train.plan import measured_plan, outlined_plan, print_plan
from train.record import as_json, check_same_run, keep_metrics_up_to, read_metrics
from train.signals import Interrupted, Stop
from train.stages import Stage, build_model, compile_mlps, draft_config
from train.state import Position, latest
from train.states import LiveStates, MemoryStates, States
from train.stored import digest_of, made_with, split, stored

CONFIGS = str(Path(__file__).resolve().parent.parent / "configs")


class Run:
    """Everything that stays the same from stage to stage."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.folder = writable(Path(config.output) / config.name, "output")
        if config.data.states == "cache":
            writable(Path(config.data.cache).parent, "data.cache")
        self.accelerator = distributed.start(config, self.folder)
        self.target = TargetModel.load(
            config.target.name, dtype=config.target.dtype, device=str(self.accelerator.device)
        )
        samples = self.samples()
        self.train, self.held_out = split(samples, config.data.eval_samples)
        self.digest = digest_of(samples)
        distributed.check_same_everywhere(
            self.accelerator,
            "the target, the data or the configuration",
            {**self.target.fingerprint(), "data": self.digest, "settings": as_json(config)},
        )
        self.draft = draft_config(self.target, config.model, self.train)
        self.counts_V = token_counts(self.train, self.target.vocab_size)

    def samples(self) -> Sequence[Sample]:
        data, kwargs = self.config.data, self.config.target.template_kwargs
        found = stored(data.train)
        if found is not None:
            found.check(made_with(self.target, data, kwargs))
            return found
        return load_samples(
            data.train,
            self.target,
            max_length=data.max_length,
            last_turn_only=data.last_turn_only,
            template_kwargs=kwargs,
            limit=data.limit,
        ).samples

    def stage_config(self, stage: StageConfig) -> DraftConfig:
        return replace(self.draft, context=stage.context)  # type: ignore[arg-type]

    def layer_ids(self) -> tuple[int, ...]:
        """Every target layer that some stage reads, and the last one for the target's rows."""
        layers = {self.target.num_layers - 1}
        for stage in self.config.stages:
            layers |= set(self.stage_config(stage).state_layer_ids)
        return tuple(sorted(layers))

    def states(self) -> States:
        if self.config.data.states == "live":
            return LiveStates(self.target, self.layer_ids())
        if self.config.data.states == "cache":
            return self.cached()
        limit = self.config.data.states_limit_gb * 1e9
        return MemoryStates(self.target, self.layer_ids(), [*self.train, *self.held_out], limit)

    def cached(self) -> CachedStates:
        """The cache of `data.cache`, made first if it is not there."""
        data, folder = self.config.data, Path(self.config.data.cache)
        prints, drafts = self.target.fingerprint(), map(self.stage_config, self.config.stages)
        packed = {k for d in drafts if d.context != "taps" for k in d.packed_layer_ids}
        layout = cache.Layout(
            weights=prints["weights"],
            tokenizer=prints["tokenizer"],
            samples=f"{self.digest} {len(self.held_out)}",
            template_kwargs=json.dumps(dict(self.config.target.template_kwargs), sort_keys=True),
            tap_ids=self.draft.tap_ids,
            history_ids=tuple(sorted(packed)),
            last=self.target.num_layers - 1,
            num_draft=self.draft.num_draft_tokens,
            anchors_per_sample=data.cache_anchors,
            seed=self.config.seed,
            dtype=data.cache_dtype,
        )
        found = (folder / cache.MANIFEST).exists()
        self.accelerator.wait_for_everyone()  # or a quick rank would find what another makes
        if not found:
            limit = math.inf if data.cache_yes else data.cache_limit_gb * 1e9
            cache.write(
                folder, layout, self.target, self.train, self.held_out, self.accelerator, limit
            )
        return CachedStates(folder, layout)

    def finished(self, name: str) -> Path:
        return self.folder / "stages" / name

    def build(self, stage: StageConfig, *, random: bool = False) -> Stage:
        """A stage's model from its `init`, with its teacher; all `random` to plan a run."""
        model = self.fresh(stage)
        if stage.init != "random" and not random:
            warm_start(model, self.load(stage.init))
        teacher = None
        if stage.teacher is not None:
            named = next(s for s in self.config.stages if s.name == stage.teacher)
            teacher = self.fresh(named) if random else self.load(stage.teacher)
            teacher.eval().requires_grad_(False)
        made = Stage(stage, model, self.target, teacher, self.config.optim.gamma)
        made.form = self.config.history_attention
        model.checkpointing = self.config.activation_checkpointing
        if self.config.compile:
            compile_mlps(model)
        return made

    def fresh(self, stage: StageConfig) -> DraftModel:
        return build_model(
            self.stage_config(stage),
            self.target,
            self.counts_V,
            self.config.model.head_init,
            self.config.seed,
        )

    def load(self, name: str) -> DraftModel:
        (stage,) = (s for s in self.config.stages if s.name == name)
        model = DraftModel(self.stage_config(stage))
        model.load_state_dict(read_tensors(self.finished(name)))
        return model.to(self.target.device).bind(self.target)

    def save(self, stage: Stage) -> None:
        """A finished stage, in float32: what later stages start from."""
        if self.accelerator.is_main_process:
            name = stage.config.name
            training = {"template_kwargs": self.config.target.template_kwargs, "stage": name}
            folder, dtype = self.finished(name), torch.float32
            dlite.checkpoint.save(
                stage.model, folder, target=self.target, training=training, dtype=dtype
            )
        self.accelerator.wait_for_everyone()

    def keep_best(self, stage: Stage, step: int, tau: float) -> None:
        """Writes `best/STAGE` when no evaluation of the stage had as high a tau before."""
        name, metrics = stage.config.name, read_metrics(self.folder)
        before = [m["tau"] for m in metrics if m["stage"] == name and "tau" in m]
        if tau > max(before, default=-1.0):
            record = {"stage": name, "step": step, "tau": tau}
            self.export(stage, self.folder / "best" / name, record)

    def export(self, stage: Stage, folder: Path, record: dict[str, Any]) -> None:
        summary = {
            **record,
            "template_kwargs": self.config.target.template_kwargs,
            "command": "python -m train.run " + " ".join(sys.argv[1:]),
            "samples": len(self.train),
            "stages": [
                {"name": s.name, "epochs": s.epochs, "max_steps": s.max_steps}
                for s in self.config.stages
            ],
        }
        dlite.checkpoint.save(stage.model, folder, target=self.target, training=summary)


def train(config: TrainConfig) -> None:
    if config.run == "plan" and config.plan.samples:
        print_plan(outlined_plan(config), config, Path(config.output) / config.name)
        return
    run = Run(config)
    if config.run == "plan":
        print_plan(measured_plan(run), config, run.folder)
        return
    found = latest(run.folder / "state") if config.resume else None
    if run.accelerator.is_main_process:
        check_same_run(run.folder, config, resuming=found is not None)
        keep_metrics_up_to(run.folder, config.stages, found[1] if found else None)
    if config.tracker:
        run.accelerator.init_trackers("dlite", json.loads(as_json(config)))
    data = Data(run.train, run.held_out, run.states())
    names = [s.name for s in config.stages]
    first = names.index(found[1].stage) if found else 0
    stage = None
    with Stop() as stop:
        for number, stage_config in enumerate(config.stages[first:], start=first):
            resumed = found if number == first else None
            stage = fit_stage(run, stage_config, data, resumed, stop)
    assert stage is not None
    if run.accelerator.is_main_process:
        last = {"stage": stage.config.name, "step": num_steps(stage, data, config)}
        run.export(stage, run.folder / "export", last)
        print(f"draft model: {run.folder / 'export'}")
    run.accelerator.end_training()


def fit_stage(
    run: Run,
    config: StageConfig,
    data: Data,
    resumed: tuple[Path, Position] | None,
    stop: Stop,
) -> Stage:
    """Trains one stage, from a state if there is one; gives it whole on every rank."""
    stage = run.build(config)
    run.accelerator.free_memory()
    fit = Fit(
        stage,
        data,
        run.target,
        run.config,
        run.accelerator,
        run.folder,
        stop=stop,
        keep_best=run.keep_best,
    )
    start = 0
    if resumed is not None:
        fit.trained.read(resumed[0])
        start = resumed[1].step
    fit.run(start)
    trained = fit.whole()
    run.save(trained)
    fit.save(fit.num_steps)
    return trained


def main(argv: list[str]) -> int:
    """One run, or with `--multirun` Hydra's sweep over comma-separated values."""
    if {"-m", "--multirun"} & set(argv):
        hydra.main(version_base="1.3", config_path=CONFIGS, config_name="train")(_run)()
        return 0
    try:
        with hydra.initialize_config_dir(CONFIGS, version_base="1.3"):
            composed = hydra.compose("train", argv)
        _run(composed)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        print(f"error: {_reason(error)}", file=sys.stderr)
        return 2
    except Interrupted as signal:
        print(signal, file=sys.stderr)
        return 128 + signal.number
    return 0


def _reason(error: Exception) -> str:
    """One line. Hydra's advice on an unknown key, to add it, would only bring another error."""
    cause = error.__cause__
    if isinstance(cause, ConfigAttributeError) and is_dataclass(cause.object_type):
        known = ", ".join(field.name for field in fields(cause.object_type))
        return f"unknown key {cause.full_key!r}; known keys are {known}"
    why = f": {str(cause).splitlines()[0]}" if isinstance(cause, OmegaConfBaseException) else ""
    return " ".join(str(error).split()) + why


def _run(composed: DictConfig) -> None:
    train(check(composed))


ConfigStore.instance().store("schema", TrainConfig)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
