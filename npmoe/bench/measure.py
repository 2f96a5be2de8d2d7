"""`npmoe bench`: milliseconds of a decode step beside the floor that its bytes set."""

from dataclasses import dataclass, field
from typing import Any

from npmoe.bench import on_cpu, on_gpu
from npmoe.bench.bandwidth import read_bandwidth
from npmoe.bench.check import tokens_checked
from npmoe.bench.record import gpu_name
from npmoe.bench.subject import Subject, check_subject, weights_of
from npmoe.bench.traffic import Traffic, step_traffic
from npmoe.config import ROTATED, EngineConfig, KVCacheConfig, WeightsPolicy
from npmoe.dtypes import gigabytes
from npmoe.models.gpu import BUCKETS


@dataclass(frozen=True)
class BenchOptions:
    """What to measure. weights: part -> format, other parts as the model has them. context: tokens
    that the measured token attends to, itself included. nvtx: steps without graphs, in NVTX
    ranges, whose times are not those of decoding. check: compare tokens on a small copy (GPU)."""

    weights: WeightsPolicy = field(default_factory=dict)
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    batch: int = 1
    context: int = 1024
    page_size: int = EngineConfig.page_size
    nvtx: bool = False
    check: bool = False
    quiet: bool = True


def measure(subject: Subject, options: BenchOptions, device: str) -> dict[str, Any]:
    """The record of one measurement; see `describe_record` for what it says.

    Every sequence of a batch gets one token a step: ms_per_token and bytes_per_token are a step's.
    Raises ValueError for an option out of range, and what `check_subject` raises.
    """
    check_options(subject, options, device)
    if device == "cuda":
        pages = on_gpu.pages_for(subject.spec, options.context, options.page_size)
    else:
        pages = -(-options.context // options.page_size)
    tokens = options.batch * pages * options.page_size
    given = subject, options.weights, options.kv_cache, tokens
    check_subject(*given, device, sequences=options.batch)
    bandwidth = read_bandwidth(device)
    weights = weights_of(subject, options.weights, device, options.quiet)
    run = _on_gpu if device == "cuda" else _on_cpu
    traffic, results = run(subject, weights, options)
    each = results["ms_per_token"]
    floor = 1e3 * traffic.total / bandwidth
    kv = options.kv_cache
    behind = [ROTATED] * kv.rotated + ([str(kv.windows)] if kv.windows else [])
    halves = [":".join([name, *behind]) for name in (kv.key_format, kv.value_format)]
    return {
        "shape": subject.name,
        "device": device,
        **({"gpu": gpu_name()} if device == "cuda" else {}),
        "weights": subject.chosen_briefly(options.weights),
        "kv": halves[0] if halves[0] == halves[1] else halves,
        "batch": options.batch,
        "context": options.context,
        "page_size": options.page_size,
        "graphs": device == "cuda" and not options.nvtx,
        "bytes_per_token": round(traffic.total),
        "read_gbps": round(bandwidth / 1e9, 1),
        "floor_ms": round(floor, 4),
        "ratio": round(each / floor, 3),
        **{k: round(v, 4) for k, v in results.items()},
    }


def check_options(subject: Subject, options: BenchOptions, device: str) -> None:
    """Raises ValueError with the name and the legal range of an option out of it."""
    longest = subject.spec.max_positions
    if not 1 <= options.context <= longest:
        raise ValueError(f"context = {options.context}: legal values are 1 to {longest}")
    if options.batch < 1 or (device == "cuda" and options.batch not in BUCKETS):
        legal = ", ".join(map(str, BUCKETS)) if device == "cuda" else ">= 1"
        raise ValueError(f"batch = {options.batch}: legal values are {legal}")
    if options.page_size < 1:
        raise ValueError(f"page_size = {options.page_size}: legal values are >= 1")
    for name in ("nvtx", "check"):
        if getattr(options, name) and device == "cpu":
            raise ValueError(f"{name}: there is nothing to do on the CPU; it needs device = 'cuda'")


def _traffic(
    subject: Subject, weights: dict[str, Any], cache: Any, options: BenchOptions, device: str
) -> Traffic:
    return step_traffic(
        *(subject.spec, subject.parameters, weights, cache),
        *(options.batch, options.context, device),
    )


def _on_cpu(
    subject: Subject, weights: dict[str, Any], options: BenchOptions
) -> tuple[Traffic, dict[str, Any]]:
    model, cache, batch = on_cpu.cpu_setup(
        *(subject.spec, weights, options.kv_cache),
        *(options.batch, options.page_size, options.context),
    )
    times = on_cpu.step_ms(model, cache, batch)
    return _traffic(subject, weights, cache, options, "cpu"), _by_choice(times)


def _on_gpu(
    subject: Subject, weights: dict[str, Any], options: BenchOptions
) -> tuple[Traffic, dict[str, Any]]:
    results: dict[str, Any] = {}
    setup = on_gpu.GpuSetup.make(
        *(subject.spec, weights, options.kv_cache),
        *(options.batch, options.page_size, options.context),
    )
    times = {}
    for way, step in on_gpu.sampled_steps(setup, options.context).items():
        replayed = on_gpu.replayable(step, options.context, options.nvtx)
        times[way] = on_gpu.step_ms(step, replayed, options.context)
        if way == "greedy" and not options.nvtx:
            results |= on_gpu.engine_times(setup, step)
    if options.check:
        formats = subject.chosen(options.weights)
        checked = tokens_checked(subject.raw, formats, options.kv_cache, options.batch)
        results |= {"tokens_checked": checked.equal, "tokens_near_tied": checked.near_tied}
    return _traffic(subject, weights, setup.cache, options, "cuda"), _by_choice(times) | results


def _by_choice(times: dict[str, float]) -> dict[str, float]:
    """ms_per_token is of greedy steps, ms_per_token_top_p of those that draw."""
    return {
        "ms_per_token" if way == "greedy" else f"ms_per_token_{way}": ms
        for way, ms in times.items()
    }


def describe_record(record: dict[str, Any]) -> str:
    """A record for a terminal."""
    r = record
    where = r.get("gpu", r["device"])
    head = (
        f"{r['shape']} on {where}: weights {format_words(r['weights'])}, "
        f"KV cache {format_words(r['kv'])}, batch {r['batch']}, context {r['context']:,}"
    )
    rows = {
        "bytes of a step": gigabytes(r["bytes_per_token"]),
        "floor": f"{r['floor_ms']:.3f} ms at {r['read_gbps']:,.0f} GB/s, measured",
        "step, greedy": f"{r['ms_per_token']:.3f} ms, {r['ratio']:.2f} x the floor"
        + ("" if r["graphs"] or r["device"] == "cpu" else ", without graphs"),
    }
    if "ms_per_token_top_p" in r:
        rows["step, top-p"] = f"{r['ms_per_token_top_p']:.3f} ms"
    if "host_gap_pct" in r:
        rows["host gap"] = f"{r['host_gap_pct']:.1f} % of a step"
        rows["prompt"] = f"{r['prompt_tokens']:,} tokens in {r['prompt_ms']:.0f} ms"
    if "tokens_checked" in r:
        rows["tokens checked"] = f"{r['tokens_checked']} equal to NumPy's, on a small copy"
    if r.get("tokens_near_tied"):
        rows["near-tied"] = f"{r['tokens_near_tied']} with the other expert of a near-tied router"
    return "\n".join([head, *(f"  {name:16} {text}" for name, text in rows.items())])


def format_words(formats: str | dict[str, str] | list[str]) -> str:
    """Formats of a record as a command line spells them."""
    if isinstance(formats, dict):
        return ",".join(f"{part}={name}" for part, name in formats.items())
    return formats if isinstance(formats, str) else ",".join(formats)
