"""`autods explain`: the keys of a DeepSpeed config in words, what they cost, and what is wrong with them."""
