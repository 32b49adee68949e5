import pytest

from autods.units import (
    format_bytes,
    format_count,
    format_factor,
    format_factor_below,
    format_in,
    format_signal,
    parse_amount,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("416MiB", 416 * 2**20),
        ("16 GiB", 16 * 2**30),
        ("16gib", 16 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5G", 1_500_000_000),
        ("0.5Ti", 2**39),
        ("1024", 1024),
        (" 7 kb ", 7000),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["banana", "", "0", "0GiB", "-1GiB", "16 parsecs", "1e9", "GiB", "nan", "1,5GiB"])
def test_what_is_not_a_size_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ValueError, match="416MiB, 16GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (416 * 2**20, "416.0 MiB"), (-3 * 2**20, "-3.0 MiB"), (3 * 2**40, "3.0 TiB")],
)
def test_bytes_are_shown_in_the_unit_that_reads_best(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(("size", "text"), [(0, "0.0"), (20 * 2**20, "< 0.1"), (54 * 2**20, "0.1"), (2**41, "2,048.0")])
def test_a_column_in_one_unit_shows_no_bytes_as_none(size: int, text: str) -> None:
    assert format_in(size, 2**30) == text


def test_parameters_are_shown_as_people_say_them() -> None:
    assert [format_count(n) for n in (999, 32_638_976, 1_543_714_304)] == ["999", "32.6M", "1.54B"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(999.6, "1K"), (999_499, "999K"), (999_999, "1M"), (999_885_952, "1B"), (1.5e15, "1500T")],
)
def test_a_count_is_rounded_before_its_unit_is_chosen(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("number", "name"),
    [(9, "SIGKILL"), (34, "SIGRTMIN"), (40, "SIGRTMIN+6"), (63, "SIGRTMAX-1"), (32, "signal 32"), (99, "signal 99")],
)
def test_every_signal_has_a_name_as_kill_lists_it(number: int, name: str) -> None:
    assert format_signal(number) == name


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("300B", 3e11),
        ("1.5T", 1.5e12),
        ("300e9", 3e11),
        ("2.5E+11", 2.5e11),
        ("20M", 2e7),
        ("1,000,000", 1e6),
        ("7", 7),
    ],
)
def test_an_amount_is_read_as_people_write_it(text: str, amount: float) -> None:
    assert parse_amount(text) == pytest.approx(amount)


@pytest.mark.parametrize("text", ["", "0", "-3B", "many", "300 billion", "nan", "inf", "1e-3", "B"])
def test_what_is_no_amount_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"300B, 1\.5T"):
        parse_amount(text)


def test_an_absurd_amount_is_refused() -> None:
    with pytest.raises(ValueError, match="more than"):
        parse_amount("1e300")


@pytest.mark.parametrize(
    ("factor", "text"), [(0.826, "0.83"), (1.034, "1.03"), (2.5, "2.5"), (19.59, "20"), (1234.5, "1,234")]
)
def test_a_factor_has_no_more_figures_than_it_means(factor: float, text: str) -> None:
    assert format_factor(factor) == text


@pytest.mark.parametrize(("factor", "shown"), [(1.0, "1.00"), (1.0266, "1.027"), (1.02999, "1.02999"), (0.4, "0.40")])
def test_a_factor_below_a_limit_does_not_look_like_it(factor: float, shown: str) -> None:
    assert format_factor_below(factor, 1.03) == shown
