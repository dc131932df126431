"""Tables of what bench/peers.py found, and the issue's figures beside what was to be reached."""

from contenders import CONTENDERS

WITHIN = 1.01  # the target: DDP's final loss, give or take 1%
LOCAL_PEERS = ("post-local", "accelerate", "torchft", "torchft-fragments", "exogym")
OURS = tuple(name for name, contender in CONTENDERS.items() if contender.ours)


def report(found: dict) -> str:
    where = found["machine"]
    head = f"{where['device']}, {where['cores']} cores, torch {where['torch']}; peers: "
    parts = [head + ", ".join(f"{name} {v}" for name, v in found["peers"].items())]
    if "tuning" in found:
        parts.append(tuning_table(found["tuning"]))
    if "quality" in found:
        parts.append(quality_table(found["quality"]))
    parts += [pace_table(found, rate) for rate in found.get("pace", {})]
    parts.append(markdown(["figure", "found", "to reach"], figures(found)))
    return "\n\n".join(parts)


def tuning_table(tuning: dict) -> str:
    rows = [[name, failed(each) or f"{each['final_loss']:.4f}"] for name, each in tuning.items()]
    return markdown(["tried", "final loss"], rows)


def quality_table(quality: dict) -> str:
    rows = []
    for name, each in quality.items():
        if error := failed(each):
            rows.append([label(name), error, "", "", "", ""])
            continue
        change = over_ddp(quality, name)
        rows.append([
            label(name),
            f"{each['final_loss']:.4f}",
            "" if change is None else f"{100 * change:+.1f}%",
            str(steps_to_target(quality, name) or "not reached"),
            str(each.get("gradient_steps", "")),
            f"{each['peak_bytes'] / 1e6:.0f} MB" if "peak_bytes" in each else "",
        ])  # fmt: skip
    columns = ["contender", "final loss", "over DDP", "steps to target", "gradients", "peak memory"]
    return markdown(columns, rows)


def pace_table(found: dict, rate: str) -> str:
    rows, every = [], found["size"]["sync_every"]
    for name, each in found["pace"][rate].items():
        if error := failed(each):
            rows.append([label(name), error, "", "", "", "", ""])
            continue
        seconds, ratio = time_to_target(found, rate, name), faster_than_ddp(found, rate, name)
        exposed = "exposed_s" in each
        rows.append([
            label(name),
            f"{1e3 * each['step_s']:.1f}",
            f"{each['exposed_s'] / each['round_steps'] * every:.2f}" if exposed else "",
            f"{100 * each['exposed_s'] / each['round_s']:.0f}%" if exposed else "",
            f"{each['bytes_per_step'] / 1e3:.1f}" if "bytes_per_step" in each else "",
            "not reached" if seconds is None else f"{seconds:.0f}",
            "" if ratio is None else f"{ratio:.1f} x",
        ])  # fmt: skip
    columns = [f"over {rate}", "ms/step", f"exposed s per {every} steps", "of the time", "kB/step"]
    return markdown([*columns, "s to target", "faster than DDP"], rows)


def figures(found: dict) -> list[list[str]]:
    """One row per figure of the issue that the phases run so far can give."""
    rows: list[list[str]] = []
    pace, quality = found.get("pace", {}), found.get("quality", {})
    for rate, each in pace.items():
        rows += against_ddp(found, rate, each) + against_peers(found, rate, each)
    rows += losses(quality) + fewer_bytes(pace)
    for kind, contenders in found.get("overlap", {}).items():
        for name, each in contenders.items():
            share = failed(each) or f"{100 * each['exposed_s'] / each['round_s']:.1f}% of a round"
            name = f"exposed, H = 16, 100 Mbit/s, {label(name)}, {kind}"
            rows.append([name, share, "at most 5%"])
    return rows + about_draws(found.get("draws")) + about_scaling(found.get("scaling"))


def against_ddp(found: dict, rate: str, pace: dict) -> list[list[str]]:
    ddp = pace.get("ddp", {})
    if "exposed_s" not in ddp:
        return []
    share = ddp["exposed_s"] / ddp["round_s"]
    rows = [[f"{rate}: torch DDP's time spent communicating", f"{100 * share:.0f}%", ""]]
    if share < 0.9:
        return rows
    for name in (each for each in pace if each.startswith("palsgd")):
        ratio, ideal = faster_than_ddp(found, rate, name), ideal_ratio(found, rate, name)
        if ratio and ideal:
            rows.append([f"{rate}: {label(name)} faster than DDP", f"{ratio:.1f} x", "8 x"])
            rows.append(["  of the ideal, its compute alone", f"{100 * ratio / ideal:.0f}%", "90%"])
    return rows


def ideal_ratio(found: dict, rate: str, name: str) -> float | None:
    """Over DDP, if nothing but the gradients' own compute time were left."""
    each, steps = found["pace"][rate][name], steps_to_target(found.get("quality", {}), name)
    ddp = time_to_target(found, rate, "ddp")
    if not steps or not ddp:
        return None
    return ddp / (steps * each["gradient_steps"] * each["bare_step_s"] / each["round_steps"])


def against_peers(found: dict, rate: str, pace: dict) -> list[list[str]]:
    def best(names):
        times = {name: time_to_target(found, rate, name) for name in names if name in pace}
        reached = {name: seconds for name, seconds in times.items() if seconds}
        return min(reached.items(), key=lambda each: each[1]) if reached else None

    ours, theirs = best(OURS), best(LOCAL_PEERS)
    if not ours or not theirs:
        return []
    name = f"{rate}: {label(ours[0])} over the best peer, {label(theirs[0])}"
    return [[name, f"{theirs[1] / ours[1]:.2f} x", "1.3 x at 10mbit, 1 x at loopback"]]


def losses(quality: dict) -> list[list[str]]:
    rows = []
    for kind, most in (("int8", 0.3), ("int4", 1.0)):
        each, plain = (quality.get(name, {}) for name in (f"palsgd-{kind}", "palsgd"))
        if "final_loss" in each and "final_loss" in plain:
            change = 100 * (each["final_loss"] / plain["final_loss"] - 1)
            name = f"final loss with {kind} and overlap over plain PALSGD"
            rows.append([name, f"{change:+.2f}%", f"within {most}%"])
    return rows


def fewer_bytes(pace: dict) -> list[list[str]]:
    rows = []
    for rate, each in pace.items():
        many, few = (each.get(name, {}).get("bytes_per_step") for name in ("ddp", "palsgd-int4"))
        if many and few:
            name = f"{rate}: bytes of fp32 DDP over PALSGD with int4"
            rows.append([name, f"{many / few:.0f} x", "400 x"])
    return rows


def about_draws(draws: dict | None) -> list[list[str]]:
    if not draws:
        return []
    if error := failed(draws):
        return [["draws", error, ""]]
    return [
        [
            "waiting that balanced draws save, of a round",
            f"{100 * draws['measured_share']:.1f}%",
            f"{100 * draws['theory_share']:.1f}% in theory, "
            f"{100 * draws['drawn_share']:.1f}% for the coins drawn",
        ],
    ]


def about_scaling(scaling: dict | None) -> list[list[str]]:
    if not scaling:
        return []
    if error := failed(scaling):
        return [["scaling", error, ""]]
    rows = []
    for workers, each in scaling["measured"].items():
        ring = f"ring: {each['ring_s']:.3f} s" if "ring_s" in each else ""
        rows.append([f"sync at K = {workers}, {scaling['rate']}", f"{each['sync_s']:.3f} s", ring])
    more = ", ".join(f"{k}: {s:.2f} s" for k, s in scaling["modelled"].items() if int(k) > 8)
    misfit = f"misses the measured by at most {100 * scaling['worst_misfit']:.0f}%"
    return [*rows, ["a ring fitted to these, at K =", more, misfit]]


# -- from steps to seconds -------------------------------------------------------------------------


def steps_to_target(quality: dict, name: str) -> int | None:
    each, ddp = quality.get(name, {}), quality.get("ddp", {})
    if "final_loss" not in each or "final_loss" not in ddp:
        return None
    target = WITHIN * ddp["final_loss"]
    if "curve" not in each:  # evaluated at the end only
        return each["steps"] if each["final_loss"] <= target else None
    return next((clock for clock, loss in each["curve"] if loss <= target), None)


def time_to_target(found: dict, rate: str, name: str) -> float | None:
    steps = steps_to_target(found.get("quality", {}), name)
    each = found["pace"][rate].get(name, {})
    return steps * each["step_s"] if steps and "step_s" in each else None


def faster_than_ddp(found: dict, rate: str, name: str) -> float | None:
    ddp, seconds = time_to_target(found, rate, "ddp"), time_to_target(found, rate, name)
    return ddp / seconds if ddp and seconds else None


def over_ddp(quality: dict, name: str) -> float | None:
    ddp = quality.get("ddp", {}).get("final_loss")
    return quality[name]["final_loss"] / ddp - 1 if ddp else None


# -- words -----------------------------------------------------------------------------------------


def label(name: str) -> str:
    return CONTENDERS[name].label if name in CONTENDERS else "EXO Gym DiLoCo"


def failed(each: dict) -> str:
    return f"did not run: {each['error']}" if "error" in each else ""


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
