"""The command line: `specjax generate | demo | bench | convert | doctor`."""
