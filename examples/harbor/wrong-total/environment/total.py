"""Print the sum of the numbers from 1 to N."""

import sys

print(sum(range(1, int(sys.argv[1]))))
