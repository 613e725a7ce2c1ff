"""Building blocks of the pages that commands write, each of one file that loads nothing."""
