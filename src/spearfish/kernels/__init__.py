"""QuantWeight to a fast product: prepare once, multiply many times. docs/kernel.md teaches it; formats never come here."""
