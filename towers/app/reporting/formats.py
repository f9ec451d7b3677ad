"""Numbers as a run shows them."""

from collections.abc import Mapping


def format_seconds(seconds: float) -> str:
    """41.2 -> "0:41", 3723 -> "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_values(values: Mapping[str, float]) -> str:
    """"loss 0.0812  accuracy 0.976": three decimals for a share of the examples."""
    return "  ".join(
        f"{name} {f'{value:.3f}' if 'accuracy' in name else format_loss(value)}"
        for name, value in values.items()
    )


def format_loss(loss: float) -> str:
    """Four decimals, or four digits of what they do not show."""
    return f"{loss:.4f}" if loss == 0 or 1e-3 <= abs(loss) < 1e5 else f"{loss:.3e}"
