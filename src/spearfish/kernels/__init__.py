"""QuantWeight to a fast product: prepare once, multiply many times. docs/kernel.md teaches how."""
