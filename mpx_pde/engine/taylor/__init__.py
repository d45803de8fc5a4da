"""Taylor arithmetic: values with their derivatives, through any equation.

It knows no precision. The dtypes of operands decide those of results; an evaluation of the engine
chooses them.
"""
