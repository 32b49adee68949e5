from __future__ import annotations

import random

from autods.supervisor.memory_trend import WINDOW, TierReading, WatchedTier, find_trend

MIB = 2**20
LIMIT = 1000 * MIB


def series(values):
    return [TierReading(step, int(value)) for step, value in enumerate(values, 1)]


def warn(values, last_step=None):
    """The steps that the warnings of a series name."""
    watched = WatchedTier(tier="device", limit_bytes=LIMIT)
    texts = [watched.add(point, last_step=last_step) for point in series(values)]
    return [int(text.split()[-1].replace(",", "")) for text in texts if text is not None]


def test_steady_growth_names_the_step_at_which_it_runs_out():
    readings = series(200 * MIB + 2 * MIB * step for step in range(100))
    trend = find_trend(readings[-WINDOW:], LIMIT)
    assert trend.bytes_per_step == 2 * MIB
    assert trend.runs_out_at == 401
    watched = WatchedTier(tier="device", limit_bytes=LIMIT)
    text = next(text for text in (watched.add(each, last_step=None) for each in readings) if text is not None)
    assert text == "device memory fills by 2.0 MiB a step, and 738.0 MiB are left: it runs out at about step 401"


def test_growth_with_noise_is_found_once():
    noise = random.Random(1)
    steps = warn(200 * MIB + 2 * MIB * step + noise.gauss(0, 3 * MIB) for step in range(150))
    assert len(steps) == 1
    assert 350 < steps[0] < 450


def test_noise_and_its_running_peak_are_no_growth():
    for seed in range(20):
        noise, values, peaks = random.Random(seed), [], []
        for _ in range(300):
            values.append(500 * MIB + noise.gauss(0, 20 * MIB))
            peaks.append(max(values))
        assert warn(values) == []
        assert warn(peaks) == []


def test_a_plateau_after_a_climb_is_no_growth():
    assert warn([100 * MIB] * 10 + [600 * MIB] * 200) == []
    assert find_trend(series([100 * MIB + 10 * MIB * min(step, 20) for step in range(100)])[-WINDOW:], LIMIT) is None


def test_a_tier_that_lasts_until_the_end_is_no_news():
    assert warn((200 * MIB + MIB * step for step in range(100)), last_step=150) == []


def test_a_warning_is_repeated_when_the_growth_changes_much():
    slow = [200 * MIB + MIB // 4 * step for step in range(100)]
    fast = [slow[-1] + 4 * MIB * step for step in range(1, 120)]
    steps = warn(slow + fast)
    assert 2 <= len(steps) <= 5  # the window changes over
    assert steps[-1] < steps[0] / 5


def test_few_points_tell_nothing():
    assert find_trend(series(MIB * step for step in range(31)), LIMIT) is None
