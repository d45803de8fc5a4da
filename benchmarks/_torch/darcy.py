"""neuraloperator's training on its Darcy files, by its own classes, with the settings of its
example."""

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from neuralop import H1Loss, Trainer
from neuralop.data.datasets.darcy import DarcyDataset
from neuralop.models import FNO
from neuralop.training import AdamW

from ..darcy import BATCH, CHANNELS, DECAY, HALF_TURN, MODES, RATE


class Theirs:
    """A training by neuraloperator, batch by batch as `Trainer.train_one_epoch` takes them."""

    skipped = 0

    def __init__(self, folder: Path, precision: str, data: Mapping[str, Any], seed: int):
        torch.manual_seed(seed)
        sizes = {"n_train": 1000, "n_tests": [50], "batch_size": BATCH, "test_batch_sizes": [32]}
        with contextlib.redirect_stdout(io.StringIO()):
            dataset = DarcyDataset(
                folder, **sizes, train_resolution=16, test_resolutions=[16], download=False
            )
        self.processor = dataset.data_processor
        self.batches = list(torch.utils.data.DataLoader(dataset.train_db, batch_size=BATCH))
        given = {"in_channels": 1, "out_channels": 1, "projection_channel_ratio": 2}
        self.model = FNO(n_modes=(MODES, MODES), hidden_channels=CHANNELS, **given)
        self.optimizer = AdamW(self.model.parameters(), lr=RATE, weight_decay=DECAY)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=HALF_TURN)
        self.trainer = Trainer(
            model=self.model,
            n_epochs=1,
            device="cpu",
            data_processor=self.processor,
            mixed_precision=precision == "bfloat16",
        )
        self.trainer.optimizer, self.trainer.regularizer, self.trainer.epoch = (
            self.optimizer,
            None,
            1,
        )
        self.trainer.n_samples = 0
        self.loss = H1Loss(d=2)
        self.mixed = precision == "bfloat16"
        self.model.train()
        self.processor.train()

    def __call__(self, i: int) -> None:
        """Takes a step on the batch `i`; the last one of an epoch also moves the learning rate."""
        loss = self.trainer.train_one_batch(i, dict(self.batches[i]), self.loss)
        loss.backward()
        self.optimizer.step()
        if i == len(self.batches) - 1:
            self.schedule.step()

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        self.model.eval()
        self.processor.eval()
        with torch.no_grad(), torch.autocast("cpu", enabled=self.mixed):
            out = self.model(torch.from_numpy(inputs[:, None]))
            out, _ = self.processor.postprocess(out, {})
        return out[:, 0].double().numpy()

    def memory(self) -> int:
        """Returns the largest sum of allocations in a step."""
        with torch.profiler.profile(profile_memory=True) as profile:
            self(0)
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
        return int(np.cumsum(sizes).max())
