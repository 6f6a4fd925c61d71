"""Figures for people: `146M`, `2:05`."""


def number(value: float, unit: str = "") -> str:
    """`146M`, `3.2G`: three digits and a power of a thousand."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")):
        if abs(value) >= 0.9995 * size:  # what rounds up to the next unit belongs to it
            return f"{value / size:.3g}{letter}{unit}"
    return f"{value:.3g}{unit}"


def clock(seconds: float) -> str:
    """`2:05`, `1:02:05`."""
    if seconds != seconds:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
