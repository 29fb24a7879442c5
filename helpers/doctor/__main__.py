"""`python -m helpers.doctor`"""

from . import doctor

print(doctor())
