"""The last that ranks import before they are forked: what is there stays out of their garbage.

Each of them would look at a million objects of modules, and copy the memory that these are in.
"""

from tests import garbage

garbage.leave_out()
