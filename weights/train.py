"""Train the demonstration Mixture-of-Experts model (Qwen3-MoE) and write a Hugging Face checkpoint.

    python train.py --data data --out run [--dropout 0.1 --minutes 9 --teachers run1/hf run2/hf]

`--data` holds the token streams of train_tokenizer.py. A run stops cleanly after `--minutes` and
goes on from `state.pt` in its output folder when started again. The learning rate falls to zero at
`--epochs` or, with `--budget`, after that many minutes of training, whichever comes first. In the
last part of the run (`--qat`) every forward pass rounds the expert weights to 4 bits, and the
exported checkpoint holds the rounded values. With `--teachers` the model also learns from the
mean next-token probabilities that earlier runs, given as checkpoint folders, assign to the text.

Shapes: B sequences, S positions, T = B*S, H hidden, E experts, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from model import Model, Shape, dump, export, load, rounded_experts
from torch import Tensor

TOP = 128  # teacher probabilities kept per position
BALANCE = 0.01  # weight of the load-balancing loss


def orthogonalise(g: Tensor) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrices; g [N, r, c], r <= c."""
    x = g.bfloat16() if g.is_cuda else g
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for a, b, c in 5 * [(3.4445, -4.7750, 2.0315)]:
        y = x @ x.mT
        x = a * x + (b * y + c * y @ y) @ x
    return x.to(g.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are orthogonalised per matrix, batched over equal shapes."""

    def __init__(
        self, params: list[Tensor], lr: float, weight_decay: float, compiled: bool
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.orthogonalise = torch.compile(orthogonalise) if compiled else orthogonalise

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        params = group["params"]
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        moments = [self.state[p]["momentum"] for p in params]
        grads = [p.grad for p in params]
        torch._foreach_lerp_(moments, grads, 0.05)
        updates = torch._foreach_lerp(grads, moments, 0.95)
        stacks: dict[tuple[int, int], list[tuple[Tensor, Tensor, bool]]] = {}
        for p, u in zip(params, updates, strict=True):
            tall = p.shape[-2] > p.shape[-1]
            u = (u.mT if tall else u).reshape(-1, min(p.shape[-2:]), max(p.shape[-2:]))
            stacks.setdefault(tuple(u.shape[1:]), []).append((p, u, tall))
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        for (_, columns), items in stacks.items():
            update = self.orthogonalise(torch.cat([u for _, u, _ in items]))
            parts = update.split([len(u) for _, u, _ in items])
            for (p, _, tall), part in zip(items, parts, strict=True):
                part = part.mT if tall else part
                p.add_(part.reshape(p.shape), alpha=-group["lr"] * 0.2 * math.sqrt(columns))


class Windows:
    """Shuffled windows of a token stream, shifted by a new random offset in every epoch."""

    def __init__(self, tokens: Tensor, length: int, batch: int, seed: int) -> None:
        self.tokens, self.length, self.batch = tokens, length, batch
        self.random, self.queue, self.seen = np.random.default_rng(seed), [], 0

    def next(self) -> Tensor:
        """Positions of the inputs, [B, S]; the targets are one further."""
        while len(self.queue) < self.batch:
            last = len(self.tokens) - self.length - 1
            starts = np.arange(self.random.integers(self.length), last, self.length)
            self.queue += self.random.permutation(starts).tolist()
        picked, self.queue = self.queue[: self.batch], self.queue[self.batch :]
        self.seen += self.batch * self.length
        device = self.tokens.device
        return torch.tensor(picked, device=device)[:, None] + torch.arange(
            self.length, device=device
        )


def autocast(device: torch.device) -> torch.autocast | nullcontext:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


@torch.no_grad()
def evaluate(model: Model, tokens: Tensor, bytes_: int, quant: bool, exact: bool = False) -> dict:
    """Loss over non-overlapping windows that cover the whole stream, and the experts' load."""
    model.eval()
    length, total, loads = model.shape.max_position_embeddings, 0.0, 0.0
    count = len(tokens) - 1
    eager = torch.compiler.set_stance("force_eager")
    precision = nullcontext() if exact else autocast(tokens.device)
    with eager, precision, rounded_experts(model, quant):
        full = count // length * length
        batches = list(tokens[:full].view(-1, length).split(16))
        targets = list(tokens[1 : full + 1].view(-1, length).split(16))
        if full < count:
            batches.append(tokens[full:count][None])
            targets.append(tokens[full + 1 :][None])
        for x, y in zip(batches, targets, strict=True):
            hidden, _, load = model(x)
            logits = model.logits(hidden).flatten(0, 1)
            total += F.cross_entropy(logits, y.flatten(), reduction="sum").double().item()
            loads = loads + load.double().cpu() * (x.numel() / count)
    model.train()
    return {"nats": total / count, "bpb": total / math.log(2) / bytes_, "load": loads.tolist()}


@torch.no_grad()
def teach(folders: list[Path], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Mean next-token probabilities of the teachers: ids int16 and probs float16 [tokens, TOP].

    Each window of the stream overlaps the one before by half and only its second half is kept, so
    that every position but the first has at least half a window of context.
    """
    teachers = [load(folder).to(tokens.device).eval() for folder in folders]
    length = teachers[0].shape.max_position_embeddings
    half = length // 2
    ids = torch.zeros(len(tokens), TOP, dtype=torch.int16, device=tokens.device)
    probs = torch.zeros(len(tokens), TOP, dtype=torch.float16, device=tokens.device)
    starts = torch.tensor([*range(half, len(tokens) - length, half), len(tokens) - length])
    for group in (torch.zeros(1, dtype=torch.int64), *starts.split(16)):
        at = (group[:, None] + torch.arange(length)).to(tokens.device)
        keep = slice(0 if group[0] == 0 else half, length)
        with autocast(tokens.device):
            mean = sum(t.logits(t(tokens[at])[0][:, keep]).softmax(-1) for t in teachers)
        top = (mean / len(teachers)).topk(TOP, dim=-1)
        ids[at[:, keep]] = top.indices.short()
        probs[at[:, keep]] = (top.values / top.values.sum(-1, keepdim=True)).half()
    return ids, probs


def cross_entropy(
    hidden: Tensor,
    head: Tensor,
    target: Tensor,
    ids: Tensor | None,
    probs: Tensor | None,
    mix: float,
) -> tuple[Tensor, Tensor]:
    """Training loss and plain loss in nats.

    hidden [T, H], head [V, H], target [T]; the teachers' tokens ids and their probs [T, TOP].
    """
    logits = F.linear(hidden, head).float()
    norm = logits.logsumexp(-1)
    plain = (norm - logits.gather(1, target[:, None])[:, 0]).mean()
    if ids is None or probs is None:
        return plain, plain.detach()
    soft = (norm - (logits.gather(1, ids.long()) * probs.float()).sum(-1)).mean()
    return mix * soft + (1 - mix) * plain, plain.detach()


# ---------------------------------------------------------------- the run


class Run:
    """A training run: model, optimisers, data order, clock, and how to save and resume them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(args.seed)
        shape = Shape(**json.loads(args.shape))
        self.model = Model(shape, args.dropout).to(self.device)
        self.train, self.valid = (
            torch.from_numpy(np.load(args.data / f"{part}.npy").astype(np.int64)).to(self.device)
            for part in ("train", "valid")
        )
        self.bytes = json.loads((args.data / "bytes.json").read_text())["valid"]
        length = shape.max_position_embeddings
        self.windows = Windows(self.train, length, args.batch, args.seed)
        compiled = self.device.type == "cuda"
        named = dict(self.model.named_parameters())
        muon = [p for n, p in named.items() if n.endswith(("_proj", "_proj.weight"))]
        flat = [p for n, p in named.items() if p.ndim == 1]
        rest = [named["embed_tokens.weight"]] + [
            p for n, p in named.items() if n.endswith("mlp.gate.weight")
        ]
        self.optimisers = [
            Muon(muon, args.lr, args.decay, compiled),
            torch.optim.AdamW(
                [{"params": rest, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}],
                lr=args.lr / 2,
                betas=(0.9, 0.95),
                fused=compiled,
            ),
        ]
        self.peaks = [[g["lr"] for g in o.param_groups] for o in self.optimisers]
        self.loss = torch.compile(cross_entropy, dynamic=False) if compiled else cross_entropy
        for layer in self.model.layers if compiled else []:
            layer.compile(dynamic=False)
        self.step, self.seconds, self.teacher = 0, 0.0, None
        if (args.out / "state.pt").exists():
            state = torch.load(args.out / "state.pt", map_location=self.device, weights_only=False)
            self.model.load_state_dict(state["model"])
            for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
                optimiser.load_state_dict(saved)
            self.windows.__dict__.update(state["windows"])
            self.step, self.seconds = state["step"], state["seconds"]
        if args.teachers:
            self.teacher = teach(args.teachers, self.train)

    def save(self) -> None:
        windows = {k: v for k, v in self.windows.__dict__.items() if k != "tokens"}
        state = {
            "model": self.model.state_dict(),
            "optimisers": [o.state_dict() for o in self.optimisers],
            "windows": windows,
            "step": self.step,
            "seconds": self.seconds,
        }
        torch.save(state, self.args.out / "state.tmp")
        (self.args.out / "state.tmp").replace(self.args.out / "state.pt")

    def log(self, **entry: object) -> None:
        entry = {"step": self.step, "seconds": round(self.seconds, 1), **entry}
        with (self.args.out / "log.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(self.args.out.name, json.dumps(entry), flush=True)

    def progress(self) -> float:
        """Part of the schedule that is done, 0 to 1."""
        done = self.windows.seen / (len(self.train) * self.args.epochs)
        if self.args.budget:
            done = max(done, self.seconds / (60 * self.args.budget))
        return min(done, 1.0)

    def advance(self, progress: float) -> tuple[Tensor, Tensor]:
        """One optimiser step; the plain loss and the balance loss."""
        rate = min(1.0, (progress + 1e-3) / 0.03) * (1 - progress)
        for optimiser, peaks in zip(self.optimisers, self.peaks, strict=True):
            for group, peak in zip(optimiser.param_groups, peaks, strict=True):
                group["lr"] = peak * rate
        at = self.windows.next()
        flat = at.flatten()
        ids, probs = (None, None) if self.teacher is None else (t[flat] for t in self.teacher)
        with rounded_experts(self.model, progress > 1 - self.args.qat):
            with autocast(self.device):
                hidden, balance, _ = self.model(self.train[at])
                head, target = self.model.embed_tokens.weight, self.train[flat + 1]
                loss, plain = self.loss(
                    hidden.flatten(0, 1), head, target, ids, probs, self.args.mix
                )
            (loss + BALANCE * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return plain, balance.detach()

    def execute(self) -> bool:
        """Train until the schedule or the time limit ends; whether the schedule is complete."""
        args, began = self.args, time.monotonic()
        next_eval = 1 + int(self.progress() * args.evals)
        pending: list[tuple[Tensor, Tensor]] = []
        clock = time.monotonic()
        while (progress := self.progress()) < 1:
            if args.minutes and time.monotonic() - began > 60 * args.minutes:
                return False
            pending.append(self.advance(progress))
            if self.step % 10 == 0 or self.step < 3:
                pending[-1][0].item()  # wait for the device, so that the clock is true
                self.seconds += time.monotonic() - clock if self.step > 2 else 0.0
                clock = time.monotonic()
            if self.progress() * args.evals >= next_eval or self.step % 100 == 0:
                loss, balance = (torch.stack(x).mean().item() for x in zip(*pending, strict=True))
                pending.clear()
                entry = {"epoch": round(self.windows.seen / len(self.train), 2), "train": loss}
                entry["balance"] = balance
                if self.progress() * args.evals >= next_eval:
                    next_eval += 1
                    for name, quant in (("valid", False), ("valid_fp4", True)):
                        result = evaluate(self.model, self.valid, self.bytes, quant)
                        entry |= {name: result["nats"], f"{name}_bpb": result["bpb"]}
                self.log(**entry)
                clock = time.monotonic()
        return True

    def finish(self) -> None:
        """Export the checkpoint and write the report; losses in float32."""
        out, shape = self.args.out, self.model.shape
        report: dict[str, object] = {"steps": self.step, "seconds": round(self.seconds, 1)}
        report |= {"tokens": self.windows.seen, "epochs": self.windows.seen / len(self.train)}
        for name, quant in (("unrounded", False), ("fp4", True)):
            report[name] = evaluate(self.model, self.valid, self.bytes, quant, exact=True)
        export(self.model, out / "hf", quant=self.args.qat > 0)
        shipped = load(out / "hf").to(self.device)
        report["exported"] = evaluate(shipped, self.valid, self.bytes, False, exact=True)
        total = sum(p.numel() for p in self.model.parameters())
        expert = sum(p.numel() for p in self.model.experts())
        idle = 1 - shape.num_experts_per_tok / shape.num_experts
        report |= {"parameters": total, "expert_parameters": expert}
        report |= {"active_parameters": round(total - expert * idle), "shape": asdict(shape)}
        report["arguments"] = json.loads(json.dumps(vars(self.args), default=str))
        dump(out / "report.json", report)
        brief = {k: report[k]["bpb"] for k in ("unrounded", "fp4", "exported")}
        self.log(tokens=self.windows.seen, final_bpb=brief)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="{}", help="JSON with fields of Shape to change")
    parser.add_argument("--teachers", type=Path, nargs="*", default=[])
    parser.add_argument("--mix", type=float, default=0.7, help="weight of the teachers' loss")
    parser.add_argument("--epochs", type=float, default=30.0)
    parser.add_argument(
        "--budget", type=float, default=0.0, help="minutes of training, 0: no limit"
    )
    parser.add_argument("--minutes", type=float, default=0.0, help="stop and save, 0: never")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step")
    parser.add_argument("--lr", type=float, default=8e-3, help="Muon's peak; AdamW takes half")
    parser.add_argument("--decay", type=float, default=2.5, help="Muon's weight decay")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--qat", type=float, default=0.18, help="part of the run with fp4 experts")
    parser.add_argument("--evals", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("highest")
    run = Run(args)
    complete = run.execute()
    run.save()
    if complete:
        run.finish()


if __name__ == "__main__":
    main()
