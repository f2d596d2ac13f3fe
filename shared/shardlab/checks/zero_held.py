"""Labs 06 to 08: judges live bytes, at rest and at their peak, against the formula of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import CheckFailed
from .observe import Trial
from .zero_cases import ZeroCase
from .zero_memory import Held
from .zero_models import Sizes
from .zero_play import Played
from .zero_stage import GRADIENT, OPTIMIZER, WEIGHT, Stage

EXTRA_GRADIENT = 2  # bytes: a shard of gradients may be fp32
PER_PARAMETER = 96  # bytes: step counts that are tensors, padding of flat parts, and the like
PADDING = 1 / 28  # of what is split, where whole rows of a matrix are
ROOM = 1 / 16  # bytes per element of the model, at rest
BUCKETS = 4  # of gradients outside the shard: one fills, one or two travel, one is a copy in another order
UNITS = 5  # gathered at a time: the layer that runs, two ahead, the last one, and one that is just let go
COPIES = 1.5  # of all weights, while they are laid out anew: those as they were, and padded ones
KEPT = 3  # of them, between forward and backward
TEMPORARIES = 12  # bytes per element of a shard, while it is updated


@dataclass(frozen=True)
class HeldJudge:
    """One case in which live bytes were looked at. `all()` raises CheckFailed at the first fault."""

    trial: Trial
    index: int
    stage: Stage
    case: ZeroCase
    played: Sequence[Played]

    def all(self) -> None:
        sizes = Sizes.of(self.case)
        for rank, one in enumerate(self.played):
            for held in one.held:
                if held.dangling:
                    said = f"{_AFTER[held.moment]}, on rank {rank}, '{held.dangling}' has a shape and no memory"
                    goal = "a parameter whose weights are let go is torch.empty(0): reading it would end the process"
                    raise self._failed(said, goal, "where the storage becomes empty, parameter.data does, too")
        for number in range(min(len(one.held) for one in self.played)):
            self._live(sizes, [one.held[number] for one in self.played])
            self._peaks(sizes, number)

    def _live(self, sizes: Sizes, held: Sequence[Held]) -> None:
        """held: one per rank, of one moment. Whole parameters by owner may be uneven; on average they are not."""
        moment = held[0].moment
        if moment == "step":
            self._enough(sizes, held)
        more = 0.0
        if moment == "forward":
            more = self.gathered(sizes, KEPT) + sizes.activations
        room = (self.stage.split() + EXTRA_GRADIENT) * sizes.largest
        worst = max(range(self.n), key=lambda rank: held[rank].live)
        mean = sum(one.live for one in held) / self.n
        for low, high in self.at_rest(sizes):
            if low <= mean <= high + more and held[worst].live <= high + more + room:
                return
        psi, one = sizes.psi, held[worst]
        kinds = (("weights", one.weights), (".grad", one.gradients), ("everything else", one.others))
        told = ", ".join(f"{name} {size / psi:.2f}" for name, size in kinds)
        said = f"{_AFTER[moment]} rank {worst} holds {one.live / psi:.2f} psi bytes ({told};"
        said += f" psi = {psi:,} elements in bfloat16)"
        raise self._failed(said, f"{self._formula(sizes)}: {self.stage.kinds}", self._look(sizes, one))

    def _enough(self, sizes: Sizes, held: Sequence[Held]) -> None:
        """Weights and the optimizer's state must be there, whatever becomes of the gradients."""
        psi, live = sizes.psi, sum(one.live for one in held) / self.n
        share = self.n if self.stage.splits("parameters") else 1
        least = WEIGHT * sizes.all / share + OPTIMIZER * psi / self.n
        if live < least * 0.98:
            said = (
                f"after step() a rank holds {live / psi:.2f} psi bytes on average (psi = {psi:,} elements in bfloat16)"
            )
            goal = f"at least {least / psi:.2f} psi: weights, and optimizer {OPTIMIZER} psi/N"
            raise self._failed(said, goal, "master weights and both moments are float32, of every element on some rank")

    def _look(self, sizes: Sizes, held: Held) -> str:
        """Which of the kinds is too large."""
        psi, stage = sizes.psi, self.stage
        mine = 2 * (sizes.all / self.n + sizes.largest)  # bytes, in 16 bits
        if stage.splits("parameters") and held.weights > mine and held.moment != "forward":
            return "the parameters' .data keeps whole weights: what numel() says is not what the storage holds"
        if held.moment == "forward" and stage.splits("parameters"):
            return "the whole weights are kept from forward to backward, by the graph perhaps: gather again in backward"
        if stage.splits("gradients") and held.gradients > mine:
            return "who doesn't own an element drops its .grad when it has been reduced"
        if held.others > 0.8 * OPTIMIZER * psi and self.n > 1:
            own = f"{OPTIMIZER} psi/N = {OPTIMIZER / self.n:.2f} psi"
            return f"this rank holds optimizer state of the whole model, {OPTIMIZER} psi bytes; its own is {own}"
        if stage.splits("parameters"):
            return "memory of gathered weights that was not let go (storage.resize_(0)); flat gradients, others' state"
        return "what is kept beside the weights: flat gradients, copies of weights, state of others' elements"

    def _peaks(self, sizes: Sizes, number: int) -> None:
        """What is live in between, on top of what is live before and after."""
        rooms = {
            "construction": WEIGHT * COPIES * sizes.all + WEIGHT * 2 * sizes.unit,
            "forward": self.gathered(sizes, UNITS) + sizes.activations,
            "backward": self.gathered(sizes, UNITS) + sizes.activations + self.travelling(sizes),
            "step": self._stepping(sizes),
        }
        psi = sizes.psi
        for rank, one in enumerate(self.played):
            held = one.held[number]
            if held.moment not in rooms:
                continue
            before = one.held[number - 1].live if number else 0
            stays = max(before, held.live)
            most = stays + rooms[held.moment]
            if held.peak <= most:
                continue
            said = f"{_DURING[held.moment]} rank {rank} holds up to {held.peak / psi:.2f} psi bytes,"
            said += f" {stays / psi:.2f} before or after (psi = {psi:,} elements in bfloat16)"
            goal = f"at most {most / psi:.2f} psi then: {_ROOM[held.moment]} in between"
            raise self._failed(said, goal, self._peak_look(held.moment))

    def _peak_look(self, moment: str) -> str:
        if moment == "backward" and self.stage.splits("gradients"):
            return "each bucket's gradients go when they have been reduced: no whole flat buffer, no copy per rank"
        return _LOOK[moment]

    def _failed(self, said: str, goal: str, look: str) -> CheckFailed:
        return self.trial.failed(self.index, "memory", f"{self.trial.at(self.index)}: {said}", goal, look)

    def _formula(self, sizes: Sizes) -> str:
        psi = sizes.psi
        total = (self.stage.held(psi, self.n) + self._frozen(sizes)) / psi
        more = ""
        if sizes.frozen:
            more = f" + {WEIGHT}{'/N' * self.stage.splits('parameters')} for each of {sizes.frozen:,} frozen elements"
        return f"{self.stage.formula}{more} = {total:.2f} psi"

    @property
    def n(self) -> int:
        return self.trial.world_size

    def at_rest(self, sizes: Sizes) -> list[tuple[float, float]]:
        """(low, high): ranges of bytes, on average over the ranks. The formula; or that with a shard of gradients in
        float32, and nothing in between."""
        formula = self.stage.held(sizes.psi, self.n) + self._frozen(sizes)
        room = PER_PARAMETER * sizes.count + ROOM * sizes.psi
        padding = PADDING * self.stage.split() * sizes.psi / self.n
        ranges = [(0.0, formula + room + padding)]
        if self.stage.splits("gradients"):
            wide = formula + EXTRA_GRADIENT * sizes.psi / self.n
            ranges.append((wide - ROOM * sizes.psi, wide + room))
        return ranges

    def _frozen(self, sizes: Sizes) -> float:
        return WEIGHT * sizes.frozen / (self.n if self.stage.splits("parameters") else 1)

    def gathered(self, sizes: Sizes, units: int) -> float:
        return WEIGHT * units * sizes.unit if self.stage.splits("parameters") else 0.0

    def travelling(self, sizes: Sizes) -> float:
        """Bytes of gradients outside the shard."""
        if not self.stage.splits("gradients"):
            return GRADIENT * sizes.psi + GRADIENT * 2 * sizes.largest
        if self.case.bucket_bytes is None:
            return GRADIENT * sizes.psi
        return BUCKETS * self.case.bucket_bytes + 2 * GRADIENT * sizes.largest

    def _stepping(self, sizes: Sizes) -> float:
        shard = sizes.psi / self.n + sizes.largest
        whole = 0 if self.stage.splits("parameters") else WEIGHT * sizes.all
        return TEMPORARIES * shard + whole


_AFTER = {
    "construction": "after construction",
    "forward": "between forward and backward",
    "backward": "after backward",
    "step": "after step()",
    "rest": "after zero_grad()",
}
_DURING = {
    "construction": "during construction",
    "forward": "during forward",
    "backward": "during backward",
    "step": "during step()",
}
_ROOM = {
    "construction": "another copy of the weights, padded perhaps",
    "forward": "the layer that runs with its neighbours",
    "backward": "what a few buckets and layers need",
    "step": "temporaries of one shard",
}
_LOOK = {
    "construction": "the state of the whole model is made first and cut afterwards: make only this rank's part",
    "forward": "are all layers gathered at once? Each just before it runs, and let go behind it",
    "backward": "what is whole here, gradients or weights, that could be there for one bucket, one layer at a time?",
    "step": "is a whole copy made, in fp32 perhaps, of what only this rank's part is needed of?",
}
