"""Say of a step function what a capture would freeze, lose or break on."""
