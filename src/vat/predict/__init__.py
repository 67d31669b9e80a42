"""Between a photo and the network: masks of every form, examples on disk, tiles, results and their files."""
